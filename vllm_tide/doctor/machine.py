"""Checks of the machine: shared memory, run directory, cores, GPUs, ports."""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Set
from pathlib import Path

from vllm_tide.config import MIB, CaptureConfig
from vllm_tide.doctor.install import torch_build, vllm_device
from vllm_tide.doctor.run import Finding, Subject, check, failed, ok, skipped, warning

SHM_DIR = Path("/dev/shm")  # noqa: S108 - where segments are
DRM_DIR = Path("/sys/class/drm")
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_SEGMENT_BYTES = 3 * 4096  # header pages and rounding of a segment
_START_BYTES = 64 << 10  # with less a server neither captures nor learns
_SPARE_SHARE = 0.1  # of shared memory, for vLLM's own workers

_SMALLER = "Make tide.capture.ring_mib smaller"
_ELSEWHERE = "Set tide.run_dir or TIDE_RUN_DIR to a directory of your own."


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def can_be_made(path: Path) -> bool:
    """True if this user could make a directory that does not exist yet."""
    parent = nearest_existing(path)
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def is_memory(path: Path) -> bool:
    """True if files at a path, which need not exist yet, are lost at a restart."""
    import psutil  # type: ignore[import-untyped]

    where = nearest_existing(path).resolve()
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return False
    above = [mount for mount in mounts if where.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place the later, which hides the earlier, stays last.
    above.sort(key=lambda mount: len(Path(mount.mountpoint).parts))
    return bool(above) and above[-1].fstype in ("tmpfs", "ramfs")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"


def _ring_bytes(capture: CaptureConfig) -> int:
    return capture.ring_mib * MIB + _SEGMENT_BYTES if capture.enabled else 0


@check("shared memory")
def shared_memory(subject: Subject) -> Finding:
    """Compares the space in /dev/shm with what ring and weights segment need."""
    import psutil

    from vllm_tide.doctor.models import draft_bytes

    if problem := _write_problem(SHM_DIR):
        return problem
    ring, weights, words = _ring_bytes(subject.tide.capture), 0, "0 MiB"
    if subject.tide.swap.enabled:
        draft, words = draft_bytes(subject), "not known without the draft"
        if draft is not None:
            # As the server: two slots of twice the draft, for one published in fp32.
            weights = 2 * (2 * draft + MIB) + _SEGMENT_BYTES
            words = _mib(weights)
    need, (size, free) = ring + weights, _space(SHM_DIR)
    text = (
        f"{SHM_DIR} has {_mib(free)} free of {_mib(size)}; a server needs "
        f"{_mib(need)} (ring {_mib(ring)}, weights {words})"
    )
    if need > free:
        return failed(
            f"{text}.",
            f"{_SMALLER} or the file system larger (docker run --shm-size, mount -o "
            f"remount,size=... {SHM_DIR}).",
        )
    available = psutil.virtual_memory().available
    if need > available:
        return warning(
            f"{text}, and the system has {_mib(available)} of memory left.",
            f"{_SMALLER}: a ring is memory, taken at the start.",
        )
    if free - need < _SPARE_SHARE * size:
        return warning(
            f"{text}, which nearly fills it.",
            f"{_SMALLER} or the file system larger; vLLM's own workers use it too.",
        )
    return ok(f"{text}.")


def _write_problem(folder: Path) -> Finding | None:
    # A file without a name cannot be left behind.
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        return failed(
            f"{folder} cannot be written ({error.strerror}).",
            "Mount a tmpfs there (mode 1777); in a container give it --shm-size.",
        )
    try:
        os.write(fd, b"\0")
    except OSError as error:
        return failed(
            f"{folder} takes no byte ({error.strerror}).",
            f"Remove what fills {folder}; in a container raise --shm-size.",
        )
    finally:
        os.close(fd)
    return None


def _space(folder: Path) -> tuple[int, int]:
    """Size and free bytes of the file system that holds a folder."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


@check("run directory")
def run_directory(subject: Subject) -> Finding:
    """Judges owner, kind, mode and free space of the run directory; changes none."""
    run_dir, ring = subject.run_dir, _ring_bytes(subject.tide.capture)
    status = None
    try:
        status = run_dir.lstat()
    except FileNotFoundError:
        if not can_be_made(run_dir):
            return failed(f"{run_dir} does not exist and cannot be made.", _ELSEWHERE)
    except OSError as error:
        return failed(f"{run_dir}: {error.strerror}.", _ELSEWHERE)
    if status and not stat.S_ISDIR(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
        return failed(f"{run_dir} is {kind}.", f"Remove it. {_ELSEWHERE}")
    if status and status.st_uid != os.geteuid():
        return failed(
            f"{run_dir} belongs to user {status.st_uid}, this is {os.geteuid()}.",
            f"Run server and trainer as one user. {_ELSEWHERE}",
        )
    _, free = _space(nearest_existing(run_dir))
    if free < _START_BYTES:
        return failed(
            f"{run_dir} has no room ({free >> 10} KiB free): a server started now "
            "captures and learns nothing.",
            f"Make room there. {_ELSEWHERE}",
        )
    mode = stat.S_IMODE(status.st_mode) if status else 0o700
    if mode != 0o700:
        return warning(
            f"{run_dir} has mode {mode:04o} and not 0700.",
            f"chmod 700 {run_dir}; the next server does it too.",
        )
    if status and not os.access(run_dir, os.W_OK | os.X_OK):
        return failed(f"{run_dir} cannot be written.", _ELSEWHERE)
    if free < ring:
        return warning(
            f"{run_dir} has {_mib(free)} free, less than the ring of this "
            f"configuration ({_mib(ring)}): drafts, checkpoints and logs may not fit.",
            "Make room there, or set tide.run_dir (TIDE_RUN_DIR) to a larger disk.",
        )
    if status is None:
        return ok(f"{run_dir} is made by the first server, mode 0700.")
    return ok(f"{run_dir}, mode 0700, ours.")


@check("cores", configured=True)
def cores(subject: Subject) -> Finding:
    """Compares `tide.train.cpus` with the cores that the engine will take."""
    trainer = set(subject.tide.train.cpus or ())
    on_cpu = vllm_device() == "cpu"
    bind = os.environ.get(CORES_VARIABLE, "auto") if on_cpu else None
    allowed, total = os.sched_getaffinity(0), os.cpu_count() or 1
    have = f"{len(allowed)} of {total} cores allowed"
    try:
        engine = _bound_cores(bind)
    except ValueError:
        return failed(
            f"{CORES_VARIABLE}={bind!r} is no list of cores.",
            'Write for example "0-6", "0-2|4-6" (one list per rank), auto or nobind.',
        )
    if missing := trainer - set(range(total)):
        return (failed if missing == trainer else warning)(
            f"tide.train.cpus names {sorted(missing)}, and the machine has {total} "
            "cores.",
            f"Choose from 0..{total - 1}.",
        )
    if engine is not None and not engine <= allowed:
        return failed(
            f"{CORES_VARIABLE}={bind!r} names {sorted(engine - allowed)}, which this "
            f"process may not use ({have}).",
            f"Choose from {_ranges(allowed)}.",
        )
    if len(allowed) == 1:
        return warning(
            f"{have}: a trainer beside the engine slows it down.",
            "Allow more cores, or train elsewhere (tide.spool.url).",
        )
    if not trainer:
        return ok(
            f"{have}; the trainer takes cores that the engine leaves, and yields by "
            "niceness."
        )
    own = f"trainer on {_ranges(trainer)}"
    if bind is None:
        return ok(f"{have}; {own}.")
    taken = allowed if engine is None else engine
    if not taken & trainer:
        return ok(f"{have}; engine on {_ranges(taken)}, {own}.")
    how = f"bound to {_ranges(taken)}"
    if engine is None:
        how = f"{CORES_VARIABLE} is {bind}"
    advice = "Give tide.train.cpus fewer cores."
    if rest := _ranges(allowed - trainer):
        advice = f'Start the server with {CORES_VARIABLE}="{rest}".'
    return warning(
        f"{have}; trainer and engine may share {_ranges(taken & trainer)} ({how}): "
        "both slow down.",
        advice,
    )


def _bound_cores(bind: str | None) -> set[int] | None:
    """Cores of all ranks of a binding like "0-2,5|8-10"; None if vLLM chooses."""
    if bind is None or bind in ("auto", "nobind"):
        return None
    numbers: set[int] = set()
    for part in bind.replace("|", ",").split(","):
        first, dash, last = part.strip().partition("-")
        numbers |= set(range(int(first), int(last if dash else first) + 1))
    return numbers


def _ranges(cores: Set[int]) -> str:
    """Cores as a list of ranges: "0-2,5"."""
    starts = sorted(core for core in cores if core - 1 not in cores)
    ends = sorted(core for core in cores if core + 1 not in cores)
    runs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@check("GPUs")
def gpus(subject: Subject) -> Finding:
    """Lists the GPUs by the driver: a CUDA context would take memory."""
    build = torch_build()
    if build is None or not (build.cuda or build.hip):
        if (device := subject.tide.train.device) != "cpu":
            return failed(
                f"tide.train.device is {device} and torch is built for the CPU.",
                "Set it to cpu, or install the GPU builds of torch and vLLM.",
            )
        return skipped("torch is built for the CPU.")
    try:
        names = _amd_gpus() if build.hip else _nvidia_gpus()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return warning(
            f"nvidia-smi cannot be asked ({type(error).__name__}: {error}).",
            "Run nvidia-smi by hand; in a container expose the driver's tools.",
        )
    if not names:
        return failed(
            f"torch is built for {build} and no GPU is to be seen.",
            "Check the driver; in a container pass the devices in.",
        )
    return ok(f"{len(names)}: {'; '.join(names)}.")


def _nvidia_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("it is not installed")
    query = (
        "--query-gpu=name,memory.total,memory.used",
        "--format=csv,noheader,nounits",
    )
    lines = subprocess.check_output(  # noqa: S603 - a fixed query
        [program, *query], stderr=subprocess.DEVNULL, text=True, timeout=10
    ).splitlines()
    gpus = [line.rsplit(",", 2) for line in lines if line.strip()]
    return [_gpu(name, total, used, MIB) for name, total, used in gpus]


def _amd_gpus() -> list[str]:
    gpus = []
    for total in sorted(DRM_DIR.glob("card*/device/mem_info_vram_total")):
        texts = []
        for name in ("product_name", total.name, "mem_info_vram_used"):
            try:
                texts.append(total.with_name(name).read_text("utf-8", "replace"))
            except OSError:
                texts.append("")
        gpus.append(_gpu(texts[0], texts[1], texts[2], 1))
    return gpus


def _gpu(name: str, total: str, used: str, unit: int) -> str:
    """A GPU in words; a driver may not tell its memory ("[N/A]")."""
    name, total, used = name.strip() or "AMD GPU", total.strip(), used.strip()
    if not total.isdigit():
        return name
    more = f", {int(used) * unit / 2**30:.1f} used" if used.isdigit() else ""
    return f"{name} ({int(total) * unit / 2**30:.0f} GiB{more})"


@check("ports")
def ports(subject: Subject) -> Iterator[Finding]:
    """Tries the ports that a server and its trainer would open."""
    yield _port("server port", subject.port, "--port", "", b"vllm:")
    name, knob, train = "trainer port", "tide.train.metrics_port", subject.tide.train
    if not train.metrics_port:
        yield skipped(f"{knob} is not set.", name=name)
    else:
        ours = b"vllm_tide:trainer_"
        yield _port(name, train.metrics_port, knob, train.metrics_host, ours)


def _port(name: str, port: int, knob: str, host: str, ours: bytes) -> Finding:
    """Binds a port; asks for metrics with a name of ours if another process has it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            text = f"{port} cannot be opened ({error.strerror})."
            return failed(text, f"Change {knob}.", name)
    else:
        return ok(f"{port} is free.", name=name)
    if ours in _metrics(port):
        return warning(
            f"{port} is held by a running {name.split()[0]} of this kind.",
            f"Fine if that is the one you look at; to start another change {knob}.",
            name,
        )
    return failed(f"{port} is taken by another process.", f"Change {knob}.", name)


def _metrics(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read(4 << 20)
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()
