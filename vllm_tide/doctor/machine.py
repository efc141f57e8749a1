"""Checks of the machine: shared memory, run and state directory, device, spool."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread

from vllm_tide.config import GIB, MIB, trains_here
from vllm_tide.doctor.install import torch_build
from vllm_tide.doctor.run import Finding, Subject, check, failed, ok, skipped, warning
from vllm_tide.transport.rendezvous import read_manifests

SHM_DIR = Path("/dev/shm")  # noqa: S108 - POSIX shared memory
SPOOL_SECONDS = 10.0  # a storage backend may retry for minutes
_SEGMENT_BYTES = 3 * 4096  # header pages and rounding of a segment
_START_BYTES = 64 << 10  # minimum free space for capture and training

_SMALLER = "Reduce tide.capture.ring_mib"
_ELSEWHERE = "Set tide.run_dir or TIDE_RUN_DIR to a directory of this user."
_SPOOL = "Correct tide.spool.url, its access rights or the network."


def is_writable(path: Path) -> bool:
    """Return whether this user can write in a directory, or create it.

    Creates an unnamed file, as the mode does not suffice (such as of /proc for root).
    """
    with suppress(OSError), TemporaryFile(dir=_nearest_existing(path)):
        return True
    return False


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"


_ROWS = 8192  # of a step: vLLM's default on a GPU
_NUM_AUX = 3


def _ring_bytes(subject: Subject) -> int:
    from vllm_tide.doctor.models import hidden_size

    capture = subject.tide.capture
    if not capture.enabled:
        return 0
    size = capture.ring_bytes(_NUM_AUX, hidden_size(subject), _ROWS)
    return size + _SEGMENT_BYTES


@check("shared memory")
def shared_memory(subject: Subject) -> Finding:
    """Compare the space in /dev/shm with the need of ring and weights segment."""
    import psutil  # type: ignore[import-untyped]

    from vllm_tide.doctor.models import draft_bytes

    if problem := _write_problem(SHM_DIR):
        return problem
    ring, weights, size_text = _ring_bytes(subject), 0, "0 MiB"
    if subject.tide.swap.enabled:
        draft, size_text = draft_bytes(subject), "unknown without the draft"
        if draft is not None:
            # As in the server: two slots of twice the draft, as fp32 may be published.
            weights = 2 * (2 * draft + MIB) + _SEGMENT_BYTES
            size_text = _mib(weights)
    need, (size, free) = ring + weights, _space(SHM_DIR)
    text = (
        f"{SHM_DIR} has {_mib(free)} free of {_mib(size)}; a server needs "
        f"{_mib(need)} (ring {_mib(ring)}, weights {size_text})"
    )
    if need > free:
        return failed(
            f"{text}.",
            f"{_SMALLER} or enlarge the file system (docker run --shm-size, mount -o "
            f"remount,size=... {SHM_DIR}).",
        )
    available = psutil.virtual_memory().available
    if need > available:
        return warning(
            f"{text}, and the system has {_mib(available)} of memory available.",
            f"{_SMALLER}: the ring is memory, allocated at startup.",
        )
    return ok(f"{text}.")


def _write_problem(folder: Path) -> Finding | None:
    try:
        # An unnamed file cannot be left behind.
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.write(fd, b"\0")
        finally:
            os.close(fd)
    except OSError as error:
        return failed(
            f"{folder} cannot be written ({error.strerror}).",
            "Mount a tmpfs there (mode 1777), or free space in it; in a container use "
            "--shm-size.",
        )
    return None


def _space(folder: Path) -> tuple[int, int]:
    """Return size and free bytes of the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


@check("run directory")
def run_directory(subject: Subject) -> Finding:
    """Check owner, type, mode and free space of the run directory."""
    run_dir, status = subject.run_dir, None
    try:
        status = run_dir.lstat()
    except FileNotFoundError:
        if not is_writable(run_dir):
            return failed(f"{run_dir} is absent and cannot be created.", _ELSEWHERE)
    except OSError as error:
        return failed(f"{run_dir}: {error.strerror}.", _ELSEWHERE)
    if status and not stat.S_ISDIR(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        return failed(f"{run_dir} is {kind}.", _ELSEWHERE)
    if status and status.st_uid != os.geteuid():
        return failed(
            f"{run_dir} is owned by user {status.st_uid}, not by {os.geteuid()}.",
            f"Run server and trainer as the same user. {_ELSEWHERE}",
        )
    _, free = _space(_nearest_existing(run_dir))
    if free < _START_BYTES:
        return failed(
            f"{run_dir} is full ({free >> 10} KiB free): a server started now cannot "
            "capture or train.",
            f"Free space there. {_ELSEWHERE}",
        )
    if status is None:
        return ok(f"{run_dir} will be created by the first server, mode 0700.")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        return failed(
            f"{run_dir} has mode {mode:04o}, not 0700: no server starts there.",
            f"{_ELSEWHERE} If it has no other files: chmod 700 {run_dir}.",
        )
    if not is_writable(run_dir):
        return failed(f"{run_dir} cannot be written.", _ELSEWHERE)
    engines = ", ".join(f"pid {each.pid}" for each in read_manifests(run_dir))
    running = f"; running engines: {engines}" if engines else ""
    return ok(f"{run_dir}, mode 0700, owned by this user{running}.")


@check("switches")
def switches(subject: Subject) -> Finding:
    """Report the switches that outlive restarts: `pause` and `capture off`."""
    from vllm_tide.capture import switch

    state_dir = subject.tide.train.state_dir
    folders = switch.switch_folders(subject.run_dir, state_dir)
    remedies = {switch.PAUSED: "vllm-tide resume", switch.OFF: "vllm-tide capture on"}
    if on := switch.switches_on(folders):
        what = "captured or trained" if switch.PAUSED in on else "captured"
        options = f" --run-dir {subject.run_dir}" if subject.tide.run_dir else ""
        options += f" --state-dir {state_dir}" if state_dir else ""
        commands = "` and `".join(remedies[name] + options for name in on)
        return warning(
            f"Nothing is {what} until `{commands}`, also after restarts.",
            "Run that, if it is not intended.",
        )
    return ok("Capture and training are not switched off.")


@check("trainer's device")
def trainer_device(subject: Subject) -> Finding:
    """Compare the trainer's device with the build of torch."""
    from vllm_tide.doctor.models import training_need

    name, build = subject.tide.train.device, torch_build()
    missing = set(subject.tide.train.cpus or ()) - os.sched_getaffinity(0)
    if missing:
        return failed(
            f"tide.train.cpus has {sorted(missing)}, but this process may use "
            f"{sorted(os.sched_getaffinity(0))}.",
            "Correct it, or remove it to let the server choose.",
        )
    if build is None:
        return skipped("torch is not installed.")
    if name != "cpu" and not (build.cuda or build.hip):
        if not trains_here(subject.tide):
            return skipped(f"It is {name}, but this server starts no trainer here.")
        return failed(
            f"tide.train.device is {name}, but torch is a CPU build.",
            "Set it to cpu, or install the GPU builds of torch and vLLM.",
        )
    text = f"{name}, with torch built for {build}"
    if name != "cpu" and (need := training_need(subject)):
        text += (
            f"; training needs about {need / GIB:.1f} GiB of it: if a server uses it "
            "too, let its --gpu-memory-utilization leave that"
        )
    return ok(f"{text}.")


@check("state directory", configured=True)
def state_directory(subject: Subject) -> Finding:
    """Check the directory of stored drafts and checkpoints."""
    chosen = subject.tide.train.state_dir
    folder = Path(chosen).expanduser() if chosen else subject.run_dir / "heads"
    if not is_writable(folder):
        return failed(
            f"{folder} cannot be written.",
            "Set tide.train.state_dir to a directory on a disk.",
        )
    return ok(f"{folder} is writable.")


@check("spool", configured=True)
def spool(subject: Subject) -> Finding:
    """List the configured spool; do not create an absent directory."""
    url = subject.tide.spool.url
    if not url:
        return skipped("tide.spool.url is not set.")
    if "://" not in url or url.startswith("file://"):
        folder = Path(url.removeprefix("file://")).expanduser()
        if not folder.exists():
            if is_writable(folder):
                return ok(f"{folder} will be created by the relay, mode 0700.")
            return failed(f"{folder} cannot be created.", _SPOOL)
    answers: list[Finding] = []
    # A daemon thread, as a hanging backend must not block the exit.
    thread = Thread(target=lambda: answers.append(_listed(url)), daemon=True)
    thread.start()
    thread.join(SPOOL_SECONDS)
    late = failed(f"No answer within {SPOOL_SECONDS:.0f} s.", _SPOOL)
    return answers[0] if answers else late


def _listed(url: str) -> Finding:
    from vllm_tide.transport.shm import TransportError
    from vllm_tide.transport.spool import Store

    try:
        store = Store(url)
        engines = store.folders("")
    except TransportError as error:
        return failed(str(error), _SPOOL)
    return ok(f"{store.url} can be listed: {len(engines)} folders.")
