"""Protocols of the run directory and the state directory."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kill_points.points import Protocol
from tests.transport.commands import Command
from tests.transport.samples import (
    make_manifest,
    make_record,
    write_dead_manifest,
    write_record,
)
from tests.transport.spool_toys import ToyEngine
from vllm_tide.capture.switch import OFF, PAUSED, Switch, Switches
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.sidecar import report
from vllm_tide.sidecar.report import Report, TrainerStatus
from vllm_tide.transport import RingReader, tenant
from vllm_tide.transport.admin import (
    AdminSocket,
    Execute,
    is_served,
    send_to_all,
    sockets,
)
from vllm_tide.transport.rendezvous import (
    durable_folder,
    inspect_manifests,
    prepare_run_dir,
    read_manifests,
    reclaim_orphans,
    remove_manifest,
    require_space,
    take_lock,
    write_manifest,
)
from vllm_tide.transport.ring import peek_ring


class RunDir(Protocol):
    """A protocol of a run directory and a state directory."""

    def __init__(self, folder: Path, fault: str = "") -> None:
        super().__init__(folder, fault)
        self.run_dir, self.state = folder / "run", folder / "state"

    def begin(self) -> None:
        prepare_run_dir(self.run_dir)

    def tidy(self) -> None:
        """Another engine and its trainer start."""
        reclaim_orphans(self.run_dir)
        tenant.tenant_key(self.run_dir, str(self.state))
        lasting = durable_folder(self.run_dir, str(self.state))
        AdminSocket("trainer", self.run_dir, lasting).close()


class Manifest(RunDir):
    """An engine starts next to a live one and removes its manifest."""

    def begin(self) -> None:
        write_manifest(self.run_dir, make_manifest("other"))
        self._old = make_manifest("e1", model_name="old")  # of the test's process
        write_manifest(self.run_dir, self._old)

    def act(self) -> bool:
        require_space(self.run_dir)
        write_manifest(self.run_dir, replace(self._old, model_name="new"))
        return True

    def check(self, done: bool) -> None:
        # The engine of a test's new manifest may have been killed.
        manifests = [manifest for _, manifest in inspect_manifests(self.run_dir)]
        names = {m.engine_id: m.model_name for m in manifests if m is not None}
        assert names in ({"e1": "new", "other": ""}, {"e1": "old", "other": ""})
        assert not done or names["e1"] == "new"


class Reclaim(RunDir):
    """A start removes files of dead engines, and none of a live one."""

    def begin(self) -> None:
        write_manifest(self.run_dir, make_manifest("f" * 16))
        for number in range(6):
            dead = f"{number:016x}"
            write_dead_manifest(self.run_dir, dead)
            for name in (f"trainer-{dead}.json", f"events-{dead}.jsonl"):
                (self.run_dir / name).write_text("{}")
                os.utime(self.run_dir / name, (number, number))
        (self.run_dir / f"trainer-{'f' * 16}.json").write_text("{}")

    def act(self) -> bool:
        reclaim_orphans(self.run_dir)
        return len(os.listdir(self.run_dir)) == 10

    def check(self, done: bool) -> None:
        assert [m.engine_id for m in read_manifests(self.run_dir)] == ["f" * 16]
        assert (self.run_dir / f"trainer-{'f' * 16}.json").exists()
        names = os.listdir(self.run_dir)
        assert len(names) == 10 if done else len(names) >= 10


class Retract(RunDir):
    """An engine removes its manifest."""

    def begin(self) -> None:
        write_manifest(self.run_dir, make_manifest("other"))
        write_manifest(self.run_dir, make_manifest("e1"))

    def act(self) -> bool:
        remove_manifest(self.run_dir, "e1")
        return not (self.run_dir / "engine-e1.json").exists()

    def check(self, done: bool) -> None:
        names = {m.engine_id for m in read_manifests(self.run_dir)}
        assert names == {"other"} or not done and names == {"e1", "other"}


class Key(RunDir):
    """The tenants' key is made once and stays the same."""

    before = ""

    def begin(self) -> None:
        super().begin()
        if self.before:
            (self.run_dir / "tenants.key").write_text(self.before)

    def act(self) -> bool:
        key = tenant.tenant_key(self.run_dir, str(self.state))
        with open(self.notes, "a") as file:
            file.write(f"{key.hex()}\n")
        return True

    def check(self, done: bool) -> None:
        keys = set(self.notes.read_text().split()) if self.notes.exists() else set()
        assert len(keys) <= 1 and keys <= {self.before} or not self.before
        if done:
            assert {tenant.tenant_key(self.run_dir, str(self.state)).hex()} == keys


class MovedKey(Key):
    """It moves from the run directory to the state directory."""

    before = "5a" * 32


class On(RunDir):
    """Capture is disabled: once acknowledged, this applies to every engine."""

    target_state = True

    def begin(self) -> None:
        super().begin()
        if not self.target_state:
            Switch(self.run_dir, OFF, str(self.state)).set(True)

    def act(self) -> bool:
        return not Switch(self.run_dir, OFF, str(self.state)).set(self.target_state)

    def check(self, done: bool) -> None:
        switches = Switches(self.run_dir, str(self.state))
        assert not done or (OFF in switches.read()) == self.target_state
        assert set(switches.on) <= {OFF}
        switches.close()


class Off(On):
    """Capture is enabled again."""

    target_state = False


class Vanished(RunDir):
    """A run directory vanishes while a switch is on, and its engine polls on."""

    def begin(self) -> None:
        super().begin()
        Switch(self.run_dir, PAUSED, str(self.state)).set(True)

    def act(self) -> bool:
        switches = Switches(self.run_dir, str(self.state))
        shutil.rmtree(self.run_dir, ignore_errors=True)
        prepare_run_dir(self.run_dir)
        for _ in range(3):  # the engine polls on
            assert {PAUSED} & set(switches.read())
        switches.close()
        return (self.run_dir / PAUSED).exists()

    def check(self, done: bool) -> None:
        prepare_run_dir(self.run_dir)
        switches = Switches(self.run_dir, str(self.state))
        assert PAUSED in switches.read()
        switches.close()


class Order(RunDir):
    """A pause order reaches a trainer; its answer holds for the next one."""

    def act(self) -> bool:
        return answered(self.run_dir, self._pause, do="pause")

    def _pause(self, _: dict[str, object]) -> dict[str, object]:
        why = Switch(self.run_dir, PAUSED, str(self.state)).set(True)
        return {"ok": not why, "note": why}

    def check(self, done: bool) -> None:
        paths = sockets([self.run_dir], "trainer")
        assert not send_to_all(paths, {"do": "status"}, 1.0), "a dead trainer answers"
        switch = Switch(self.run_dir, PAUSED, str(self.state))
        assert switch.on or not done


class Purge(RunDir):
    """A trainer removes a tenant's records from a ring and confirms it."""

    def begin(self) -> None:
        self._engine = ToyEngine(self.folder)
        for seed, whose in enumerate((7, 8, 7)):
            record = replace(make_record(self._engine.spec, seed), tenant=whose)
            assert write_record(self._engine.ring, record)

    def act(self) -> bool:
        with closing(RingReader.attach(self._engine.ring.name)) as reader:

            def execute(_: dict[str, object]) -> dict[str, object]:
                while (record := reader.read()) is not None:
                    assert record.tenant in (7, 8)
                assert reader.stats().corrupt_records == 0 or self.fault == "torn"
                return {"ok": True}

            return answered(self.run_dir, execute, do="purge", tenant="7")

    def check(self, done: bool) -> None:
        stats = peek_ring(self._engine.ring.name)
        assert stats is not None and not stats.consumer_alive
        assert stats.used_bytes == 0 or not done
        assert not any(map(is_served, sockets([self.run_dir], "trainer").values()))

    def close(self) -> None:
        self._engine.close()


def answered(run_dir: Path, execute: Execute, **request: object) -> bool:
    """Serve a command through a socket; return whether its client has a good answer."""
    server = AdminSocket("trainer", run_dir)
    try:
        if not sockets([run_dir], "trainer").keys() & {server.name}:
            return False
        command = Command(run_dir, server.name, **request)
        for _ in range(2):
            server.poll(execute)
        return command.answer is not None and command.answer["ok"]
    finally:
        server.close()


class Events(RunDir):
    """A trainer writes its status and its events."""

    most = 1 << 20

    def begin(self) -> None:
        super().begin()
        old = Report(self.run_dir, "e1")
        old.write(TrainerStatus(state="old"))
        old.add("cycle", number=0)

    def act(self) -> bool:
        made = Report(self.run_dir, "e1")
        made.write(TrainerStatus(state="new"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "MAX_BYTES", self.most)
            for number in range(1, 5):
                made.add("cycle", number=number)
        return made.failed_writes == 0

    def check(self, done: bool) -> None:
        status = json.loads((self.run_dir / "trainer-e1.json").read_text())
        assert status["state"] == "new" or not done and status["state"] == "old"
        lines = (self.run_dir / "events-e1.jsonl").read_text().splitlines()
        whole = [line for line in lines if line.endswith("}")]
        numbers = [json.loads(line)["number"] for line in whole]
        assert numbers[-1:] == [4] or not done
        assert len(lines) - len(whole) <= (self.fault == "torn")


class HalvedEvents(Events):
    """The older half of them is removed."""

    most = 200


class Log(RunDir):
    """The log of a child is truncated, and its trainer's lock taken."""

    def begin(self) -> None:
        super().begin()
        self._log.write_bytes(b"x" * 5_000_000)

    @property
    def _log(self) -> Path:
        return self.run_dir / "trainer-e1.log"

    def act(self) -> bool:
        from vllm_tide.config import SpoolConfig

        child = TrainerProcess("e1", self.run_dir, "f" * 16, SpoolConfig())
        child._launch = lambda now: None  # type: ignore[method-assign]
        child._check()
        child._next = 0.0
        child._check()
        if child._lock is None:
            return False
        try:
            assert take_lock(self.run_dir, "f" * 16) is None
        finally:
            os.close(child._lock)
        return True

    def check(self, done: bool) -> None:
        size = self._log.stat().st_size
        assert size == 0 or not done and size == 5_000_000


PROTOCOLS: list[type[Protocol]] = [
    *(Manifest, Reclaim, Retract, Key, MovedKey, On, Off, Vanished),
    *(Order, Purge, Events, HalvedEvents, Log),
]
