"""Engines, trainers and an operator in virtual time: the real parts, one process.

Each engine and trainer has a separate pid; a killed one leaves the files of a killed
process, without its locks. Time passes in waits.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import secrets
import select
import shutil
import socket
import subprocess
from dataclasses import replace
from types import SimpleNamespace

from tests.transport.samples import make_manifest, make_record, make_spec, write_record
from tests.transport.spool_toys import ROWS
from vllm_tide.capture import switch
from vllm_tide.capture.recorder import Recorder
from vllm_tide.capture.switch import PAUSED, Switch, Switches
from vllm_tide.cli import purge, trainer
from vllm_tide.cli.main import main
from vllm_tide.config import CaptureConfig, SpoolConfig
from vllm_tide.engine import trainer_process
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.sidecar import report
from vllm_tide.sidecar.report import Report, TrainerStatus
from vllm_tide.transport import (
    RingWriter,
    WeightsSegment,
    admin,
    feeds,
    process,
    rendezvous,
    ring,
    shm,
)
from vllm_tide.transport.feeds import open_feeds
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.tenant import parse_id

SLICE_S = 0.25
LOAD_S = 2.0  # a trainer's start
SPEC = make_spec()
TIMED = (
    *(switch, purge, trainer, report, trainer_process, admin, feeds, process, ring),
    shm,
)


class World:
    """One host.

    Attributes:
        off, paused: Since when (monotonic) an acknowledged switch is on; None: it is
            not, or was reset.
        wrong: Messages about violated guarantees.
    """

    def __init__(self, folder, patch, models):
        self.mono, self.unix = 1000.0, 1.8e9
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.processes, self.current = 0, None
        self.engines, self.trainers, self.wrong = [], [], []
        self.served, self.purges = {}, []
        self.off = self.paused = None
        self.quiet_since = self.mono  # of faults that hide a trainer
        self.models, self.random = models, random.Random(0)
        self._patch(patch)

    def _patch(self, patch):
        real = os.getpid()
        clock = SimpleNamespace(
            time=lambda: self.unix,
            time_ns=lambda: int(self.unix * 1e9),
            monotonic=lambda: self.mono,
            monotonic_ns=lambda: int(self.mono * 1e9),
            sleep=self.run,
        )
        for module in TIMED:
            patch.setattr(module, "time", clock)
        # Sweeps decide by this world's clock: they see its own segments only.
        prefix = f"{shm.NAME_PREFIX}world_{real}_"
        for module in (shm, rendezvous):
            patch.setattr(module, "NAME_PREFIX", prefix)
        patch.setattr(os, "getpid", lambda: self.current or real)
        names = SimpleNamespace(socket=client_in(self), AF_UNIX=socket.AF_UNIX)
        patch.setattr(admin, "socket", names)
        names = SimpleNamespace(
            Popen=lambda *_, **more: Trainer(self, more["pass_fds"]),
            DEVNULL=None,
            TimeoutExpired=subprocess.TimeoutExpired,
        )
        patch.setattr(trainer_process, "subprocess", names)

    @contextlib.contextmanager
    def acting(self, pid):
        before, self.current = self.current, pid
        try:
            yield
        finally:
            self.current = before

    def spawn(self):
        self.processes += 1
        return 3_000_000 + self.processes

    def run(self, seconds):
        until = self.mono + seconds
        while self.mono < until:
            step = min(SLICE_S, until - self.mono)
            self.mono, self.unix = self.mono + step, self.unix + step
            for each in (*self.engines, *self.trainers):
                each.tick()

    def order(self, *argv):
        """Run a command; return its exit status. A failure must have a message."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = main([*argv, "--run-dir", str(self.run_dir), "--timeout", "5"])
        if status and not output.getvalue():
            self.wrong.append(f"{argv} exited with {status} without a message")
        return status

    @property
    def lively(self):
        return [t for t in self.trainers if t.attached and not t.hung]

    def purge(self, tenant):
        whose = ["--all"] if tenant is None else ["--tenant-id", f"{tenant:x}"]
        asked = self.mono
        if self.order("purge", *whose) == 0:
            self.purges.append((tenant, asked))
            for trainer in self.trainers:
                for key in trainer.records:
                    self.check_purged(key)

    def check_purged(self, key):
        tenant, when = self.served[key]
        for purged, asked in self.purges:
            if purged in (None, tenant) and when < asked:
                self.wrong.append(f"rows of {tenant}, served at {when}, are held")

    def vanish(self):
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.quiet_since = self.mono

    def reboot(self):
        for each in (*self.engines, *self.trainers):
            each.kill()
        self.vanish()

    def close(self):
        for each in (*self.trainers, *self.engines):
            each.kill()
        with self.acting(None):
            rendezvous.reclaim_orphans(self.run_dir)


class Engine:
    """Serves a request of one of two tenants in each slice, captured or not."""

    def __init__(self, world):
        self.world, self.pid = world, world.spawn()
        target, draft = world.models
        name = secrets.token_hex(8)
        with world.acting(self.pid):
            rendezvous.reclaim_orphans(world.run_dir)
            rendezvous.require_space(world.run_dir)
            self.ring = RingWriter.create(SPEC, 1 << 20)
            self.weights = WeightsSegment.create(1 << 16)
            state = str(world.state_dir)
            self.manifest = make_manifest(
                name,
                ring=self.ring.name,
                weights=self.weights.name,
                target_path=str(target),
                draft_path=str(draft),
                target_dtype="float32",
                draft_vocab_size=ROWS,
                tide={"train": {"state_dir": state}},
                created_unix=world.unix,
            )
            self.recorder = Recorder(self.ring, CaptureConfig())
            self.switches = Switches(world.run_dir, state)
            self.announce()
            group = rendezvous.group_of(self.manifest)
            self.child = TrainerProcess(name, world.run_dir, group, SpoolConfig())
        self.next_poll = self.next_report = 0.0
        world.engines.append(self)

    def announce(self):
        self.path = self.world.run_dir / f"engine-{self.manifest.engine_id}.json"
        if not self.path.exists():
            rendezvous.write_manifest(self.world.run_dir, self.manifest)

    def tick(self):
        world = self.world
        with world.acting(self.pid):
            if world.mono >= self.next_poll:
                self.next_poll = world.mono + switch.POLL_S
                self.recorder.off = bool(self.switches.read())
            if world.mono >= self.next_report:
                self.next_report = world.mono + 1.0
                self.announce()
                self.child._check()
            self.serve()

    def serve(self):
        world = self.world
        if self.recorder.collect_mode is Collect.NOTHING:
            return
        key, tenant = world.random.getrandbits(63), world.random.choice((1, 2))
        record = replace(make_record(SPEC, 1), key=key, tenant=tenant)
        if write_record(self.ring, record):
            world.served[key] = tenant, world.mono
            for what, since in (("off", world.off), ("paused", world.paused)):
                if since is not None and world.mono > since + 1.0:
                    world.wrong.append(f"a row left the engine while {what}")

    def kill(self):
        self.world.engines.remove(self)
        self.switches.close()
        rendezvous.release_manifest(self.path)
        if self.child._lock is not None:
            os.close(self.child._lock)
        with self.world.acting(None):  # not unlinked
            self.ring.close()
            self.weights.close()


class Trainer:
    """The loop of `sidecar/loop.py` without a model; to its engine a `Popen`."""

    def __init__(self, world, locks):
        self.world, self.pid, self.returncode = world, world.spawn(), None
        self.ready, self.attached, self.hung = world.mono + LOAD_S, False, False
        self.records, self.fresh = [], 0
        self.locks = [os.dup(fd) for fd in locks]
        self.feeds = self.socket = self.switches = None
        world.trainers.append(self)

    def attach(self):
        world = self.world
        self.feeds = open_feeds(world.run_dir)
        self.feeds.poll()
        if not len(self.feeds):
            self.kill(2)
            return
        state_dirs = rendezvous.state_dirs(world.run_dir)
        folders = switch.switch_folders(world.run_dir, *state_dirs)
        self.socket = admin.AdminSocket("trainer", *folders[1:])
        self.pause = Switch(world.run_dir, PAUSED, *state_dirs)
        self.switches = Switches(world.run_dir, (state_dirs or [None])[0])
        self.set_collect()
        self.report = Report(world.run_dir, self.feeds.ids[0])
        self.status = TrainerStatus(state="waiting", pid=self.pid)
        self.socket.listen_in(world.run_dir)
        self.attached = True

    def tick(self):
        if self.hung or self.returncode is not None or self.world.mono < self.ready:
            return
        with self.world.acting(self.pid):
            if not self.attached:
                self.attach()
            if self.returncode is None:
                self.run_once()

    def run_once(self):
        self.feeds.poll()
        if not len(self.feeds):
            self.socket.close()
            self.kill(0)
            return
        self.drain()
        self.feeds.heartbeat()
        if self.pause.follow(self.switches):
            self.set_collect()
        self.socket.poll(self.execute)
        if self.report.due():
            self.report.write(self.status)

    def drain(self):
        for _, records in self.feeds.read(4096):
            for record in records:
                self.records.append(record.key)
                self.fresh += 1
                self.world.check_purged(record.key)

    def execute(self, request):
        if request["do"] == "status":
            report = dict.fromkeys(
                ("waiting_for", "last_decision", "cycles", "steps", "publications"), 0
            )
            report |= {"engines": {}, "rollbacks": 0, "installed_version": 0}
            report["tenant_keys"] = []
            return {"ok": True, "status": {**report, "state": "waiting"}}
        if request["do"] == "purge":
            return self.purge(request["tenant"])
        was, on = self.pause.on, request["do"] == "pause"
        note = self.pause.set(on)
        self.set_collect()
        noted = {"note": note} if note else {}
        return {"ok": True, "paused": on, "was_paused": was, **noted}

    def purge(self, given):
        self.drain()
        tenants = self.world.served
        tenant = None if given is None else parse_id(given)
        remaining = [k for k in self.records if tenant not in (None, tenants[k][0])]
        removed, self.records = len(self.records) - len(remaining), remaining
        self.feeds.purge(tenant)
        return {"ok": True, "removed": {"tokens": removed}, "engines": self.feeds.ids}

    def set_collect(self):
        self.feeds.set_collect(Collect.NOTHING if self.pause.on else Collect.FULL)

    def kill(self, status=-9):
        """End: its sockets' names and its files stay."""
        if self.returncode is not None:
            return
        self.returncode = status
        self.world.trainers.remove(self)
        if self.switches is not None:
            self.switches.close()
        if self.socket is not None:
            for end in (*self.socket._listeners.values(), *self.socket._clients):
                if end is not None:
                    end.close()
        for name in () if self.feeds is None else self.feeds.ids:
            feed = self.feeds.feed(name)
            feed._reader._segment.close()
            feed._writer._segment.close()
        for fd in self.locks:
            os.close(fd)

    terminate = kill

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode


def client_in(world):
    class Client(socket.socket):
        """Answers in virtual time."""

        def settimeout(self, seconds):
            self.patience = seconds
            super().settimeout(5)

        def makefile(self, *args):
            until = world.mono + self.patience
            while not select.select([self], [], [], 0)[0]:
                if world.mono >= until:
                    raise TimeoutError
                world.run(SLICE_S)
            return super().makefile(*args)

    Client.__slots__ = ()
    return Client
