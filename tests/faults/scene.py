"""The scene of the faults: one server, its trainer, their run directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess  # noqa: S404 - starts the trainer under test
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]

from bench.harness.client import make_session
from bench.harness.server import ServerOptions, VllmServer
from vllm_tide.transport.rendezvous import EngineManifest, read_manifests
from vllm_tide.transport.ring import peek_ring

from .counters import Reading, read_metrics, read_status
from .leaks import left_behind
from .load import Load
from .segments import RunSegments
from .trainer import order

TRAINER_ALIVE = "vllm_tide:ring_consumer_alive"
POLL_S = 0.1
ROOT = Path(__file__).parents[2]
START_S = 240.0
"""Longest start of a trainer (s), on a machine that does other things too."""
STOP_S = 120.0
"""Longest end of a server or a trainer (s), there too."""
KV_BYTES = 9 << 20
"""KV cache (bytes): the steady load fits, a burst of long requests does not."""
MAX_MODEL_LEN = 320
MAX_SEQS = 8
Knobs = Mapping[str, Mapping[str, object]]
_NONE: Mapping[str, Any] = MappingProxyType({})


class NotRecovered(Exception):  # noqa: N818 - an outcome, not a fault of ours
    """A condition was not met in time."""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders.

    Attributes:
        venv: Virtual environment with patched vLLM.
        target: Served model.
        draft: EAGLE-3 draft.
        work: Logs and configurations.
        run_dir: Where server and trainer meet; mode 0700.
    """

    venv: Path
    target: Path
    draft: Path
    work: Path
    run_dir: Path


def tide_section(
    run_dir: Path, cpus: tuple[int, ...], knobs: Knobs = _NONE
) -> dict[str, Any]:
    """Return a `tide` section: small ring, short cycles, short canaries; `knobs`."""
    section: dict[str, Any] = {
        "run_dir": str(run_dir),
        "capture": {"ring_mib": 2},
        "train": {
            "autostart": False,  # the scene starts one that plants bad drafts
            "cpus": list(cpus),
            "min_new_tokens": 2048,
            "steps_per_cycle": 3,
            "batch_tokens": 384,
            "buffer_tokens": 16384,
            "holdout_share": 0.2,
            "learning_rate": 2e-4,
        },
        "deploy": {"canary_requests": 12},
        "control": {"client_slo_tpot_ms": 0.01},
        # The toy repeats itself: with the memory, a bad draft would not be used.
        "test_time": {"memory": "off"},
    }
    return section | {k: section.get(k, {}) | dict(v) for k, v in knobs.items()}


class Scene:
    """Starts, watches and damages one server and one trainer.

    Args:
        places: Folders.
        session: For metrics.
        load: Gets the server's address.
        knobs: Of the `tide` section, by its parts, in addition to those here.
        env: Of the server, in addition to our own.
        kv_bytes: Size of the KV cache (bytes).

    Attributes:
        engine_cpus: Cores of the engine; everything else has `other_cpus`.
        segments: Every segment that this scene's processes have made.
        ordering: Lock for orders to the trainer.
    """

    def __init__(
        self,
        places: Places,
        session: aiohttp.ClientSession,
        load: Load,
        knobs: Knobs = _NONE,
        env: Mapping[str, str] = _NONE,
        kv_bytes: int = KV_BYTES,
    ) -> None:
        self.places, self._session, self.load = places, session, load
        self._knobs, self._env, self._kv_bytes = knobs, env, kv_bytes
        cpus = sorted(os.sched_getaffinity(0))
        self.engine_cpus, self.other_cpus = (cpus[0],), tuple(cpus[1:] or cpus)
        self._server: VllmServer | None = None
        self._trainer: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.segments = RunSegments()
        self.ordering = asyncio.Lock()
        self.struck_at = 0.0

    @property
    def server(self) -> VllmServer:
        """Return the running server.

        Raises:
            NotRecovered: There is none.
        """
        if self._server is None:
            raise NotRecovered("there is no server")
        return self._server

    @property
    def run_dir(self) -> Path:
        """Return the run directory of server and trainer."""
        return self.places.run_dir

    def struck(self) -> None:
        """Start the recovery time now."""
        self.struck_at = time.monotonic()

    async def start_server(self) -> None:
        """Start a server and wait until it is ready.

        Raises:
            ServerError: It does not start.
        """
        places = self.places
        self._starts += 1
        config = places.work / "tide.json"
        section = tide_section(places.run_dir, self.other_cpus, self._knobs)
        draft = {"method": "eagle3", "model": str(places.draft)}
        spec = {**draft, "num_speculative_tokens": 3, "tide": section}
        config.write_text(json.dumps(spec, indent=2), encoding="utf-8")
        server = VllmServer(
            ServerOptions(
                venv=places.venv,
                model=places.target,
                log_path=places.work / f"server-{self._starts}.log",
                speculative_config=str(config),
                engine_cpus=self.engine_cpus,
                other_cpus=self.other_cpus,
                kv_cache_bytes=self._kv_bytes,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_SEQS,
                extra_env=self._env,
            )
        )
        self._server = server
        server.__enter__()
        await asyncio.to_thread(server.wait_ready, lambda _: None)
        server.processes()
        self.note_segments()
        self.load.url = server.url

    def start_trainer(self) -> None:
        """Start a trainer; it waits for engines and outlives them."""
        places = self.places
        log = places.work / "trainer.log"
        keep = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        command = [
            str(places.venv / "bin" / "python"),
            "-m",
            "tests.faults.trainer",
        ]
        command += ["--wait", "--run-dir", str(places.run_dir)]
        # Without this the trainer was seen to start with the affinity {0}, the core
        # of the engine, and to starve there. Why this thread has it is unknown.
        os.sched_setaffinity(0, self.other_cpus)
        with log.open("ab") as out:
            self._trainer = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=keep,
                cwd=ROOT,
            )

    @property
    def trainer(self) -> psutil.Process:
        """Return the trainer's process."""
        if self._trainer is None or self._trainer.poll() is not None:
            raise NotRecovered("the trainer died")
        return psutil.Process(self._trainer.pid)

    def kill_trainer(self) -> None:
        """SIGKILL the trainer and reap it."""
        if self._trainer is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._trainer.send_signal(signal.SIGCONT)
                self._trainer.kill()
            self._trainer.wait()
            self._trainer = None

    def engine(self) -> psutil.Process:
        """Return the process that runs the model."""
        return psutil.Process(self.manifest().pid)

    def manifest(self) -> EngineManifest:
        """Return the engine's manifest.

        Raises:
            NotRecovered: No engine is announced.
        """
        result = read_manifests(self.run_dir)
        if not result:
            raise NotRecovered("no engine is announced in the run directory")
        return result[-1]

    def note_segments(self) -> None:
        """Record the segments of this run, to check later that they are gone."""
        pids = [p.pid for some in self.server.processes().values() for p in some]
        if self._trainer is not None:
            pids.append(self._trainer.pid)
        self.segments.note(pids)

    async def stop(self) -> bool:
        """Stop everything; return whether the server ended without force."""
        self.load.url = None
        clean = True
        if self._server is not None:
            clean = await asyncio.to_thread(self._server.stop, STOP_S)
            self._server = None
        if self._trainer is not None and self._trainer.poll() is None:
            self._trainer.terminate()
            try:
                await asyncio.to_thread(self._trainer.wait, STOP_S)
            except subprocess.TimeoutExpired:
                clean = False
                self.kill_trainer()
        return clean

    async def reading(self) -> Reading:
        """Return every counter; without a server its metrics are absent."""
        result = read_status(self.run_dir)
        if self.load.url is None:
            return result
        for manifest in read_manifests(self.run_dir)[-1:]:
            ring = peek_ring(manifest.ring)
            if ring is not None:
                result["ring:corrupt_records"] = float(ring.corrupt_records)
                result["ring:used_bytes"] = float(ring.used_bytes)
        timeout = aiohttp.ClientTimeout(total=20)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(
                self.load.url + "/metrics", timeout=timeout
            ) as response:
                result |= read_metrics(await response.text())
        return result

    async def until(
        self, what: str, check: Callable[[Reading], bool], timeout_s: float = 120.0
    ) -> Reading:
        """Wait for a reading.

        Args:
            what: Waited for; for the sentence when it does not come.
            check: Of a reading.
            timeout_s: Longest wait (s).

        Raises:
            NotRecovered: It did not come.
        """
        until = time.monotonic() + timeout_s
        while True:
            now = await self.reading()
            if check(now):
                return now
            if self._trainer is not None and self._trainer.poll() is not None:
                raise NotRecovered("the trainer died")
            if time.monotonic() > until:
                raise NotRecovered(f"{what} did not come in {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)

    async def trainer_reads(self) -> None:
        """Wait until a trainer reads the ring."""
        await self.until("a trainer", lambda r: r.get(TRAINER_ALIVE) == 1, START_S)

    async def good_draft(self) -> None:
        """Order the good draft again, and wait until the engine serves it."""
        swaps = (await self.reading()).get("vllm_tide:swaps_total", 0)
        path = order(self.run_dir, "again", 0)
        try:
            await self.until(
                "a good draft",
                lambda r: (
                    not path.exists() and r.get("vllm_tide:swaps_total", 0) > swaps
                ),
            )
        finally:
            path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def serving(
    places: Places, load: Callable[[aiohttp.ClientSession], Load], **scene: Any
) -> AsyncIterator[Scene]:
    """Run a server under load and its trainer; `scene` goes to `Scene`.

    Raises:
        ServerError: The server does not start.
        NotRecovered: The trainer does not, the end needed force, or segments are left.
    """
    async with make_session() as session:
        made = Scene(places, session, load(session), **scene)
        cpus = os.sched_getaffinity(0)
        busy = asyncio.create_task(made.load.run())
        try:
            await made.start_server()
            made.start_trainer()
            await made.trainer_reads()
            yield made
        finally:
            busy.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await busy
            clean = await made.stop()
            os.sched_setaffinity(0, cpus)
        if not clean:
            raise NotRecovered("the server or the trainer had to be killed")
        if left := left_behind(made.segments.made, set()):
            raise NotRecovered(f"segments left after the end: {', '.join(left)}")
