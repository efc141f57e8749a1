"""Guarantees of the operator's commands, under any order of commands and faults.

After an acknowledged `capture off` or `pause` no row leaves an engine until the switch
is reset; after a purge that exits with 0 no live process has data that it named; a
command reaches the trainers within `REACH_S` of a fault, or fails with the reason;
learning resumes without an operator.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.admin.world import Engine, World
from tests.transport.spool_toys import make_models

REACH_S = 4.0
RESUME_S = 75.0
MODELS: list = []


class Commands(RuleBasedStateMachine):
    """Commands and faults on one host."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.world = World(Path(self.folder.name), self.patch, MODELS[0])
        self.killed = 0
        Engine(self.world)
        self.world.run(5)

    def teardown(self):
        try:
            if not self.world.wrong:
                self.resumes()
        finally:
            self.world.close()
            self.patch.undo()
            self.folder.cleanup()

    @invariant()
    def nothing_is_broken(self):
        assert self.world.wrong == []

    # Commands

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 20.0]))
    def time_passes(self, seconds):
        self.world.run(seconds)

    @rule()
    def capture_off(self):
        if self.world.order("capture", "off") == 0:
            self.world.off = self.world.mono

    @rule()
    def capture_on(self):
        self.world.off = None
        self.world.order("capture", "on")

    @rule()
    def pause(self):
        self.reached("pause")

    @rule()
    def resume(self):
        self.world.paused = None
        self.reached("resume")

    @rule()
    def status(self):
        self.reached("status")

    @rule(tenant=st.sampled_from([1, 2, None]))
    def purge(self, tenant):
        self.world.purge(tenant)

    # Faults

    @rule()
    def directory_vanishes(self):
        self.world.vanish()

    @rule()
    def directory_is_cleaned(self):
        for path in self.world.run_dir.glob("*"):
            if path.is_file() or path.is_socket():
                path.unlink()
        self.world.quiet_since = self.world.mono

    @rule(number=st.integers(0, 1000), half=st.booleans())
    def a_file_is_truncated(self, number, half):
        """But an engine's manifest: no other copy of it is made during its life."""
        folders = (self.world.run_dir, self.world.state_dir)
        paths = sorted(p for f in folders for p in f.rglob("*") if p.is_file())
        paths = [p for p in paths if not p.name.startswith("engine-")]
        if paths:
            path = paths[number % len(paths)]
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2 if half else 0)

    @rule(seconds=st.sampled_from([-1e7, -100.0, 65.0, 3e6, 1e8]))
    def the_clock_steps(self, seconds):
        self.world.unix += seconds

    @precondition(lambda self: self.world.lively)
    @rule()
    def a_trainer_hangs(self):
        self.world.lively[0].hung = True

    @precondition(lambda self: any(t.hung for t in self.world.trainers))
    @rule()
    def a_trainer_wakes(self):
        next(t for t in self.world.trainers if t.hung).hung = False
        # It repairs the effects of another fault now.
        self.world.quiet_since = self.world.mono

    @precondition(lambda self: self.world.trainers and self.killed < 5)
    @rule(which=st.integers(0, 9))
    def a_trainer_dies(self, which):
        self.killed += 1
        trainers = self.world.trainers
        trainers[which % len(trainers)].kill()
        self.world.quiet_since = self.world.mono

    @precondition(lambda self: len(self.world.engines) < 2)
    @rule()
    def an_engine_starts(self):
        Engine(self.world)
        self.world.quiet_since = self.world.mono

    @precondition(lambda self: self.world.engines)
    @rule(starts=st.booleans())
    def an_engine_dies(self, starts):
        self.world.engines[0].kill()
        if starts:
            Engine(self.world)
        self.world.quiet_since = self.world.mono

    @rule()
    def the_host_reboots(self):
        self.world.reboot()
        self.killed = 0
        Engine(self.world)

    def reached(self, command):
        """Run a command: 0 only if all trainers have it; 0 if all are in reach."""
        world = self.world
        lively = world.lively
        quiet = world.mono - world.quiet_since > REACH_S and world.engines
        hung = [t for t in world.trainers if t.hung]
        status = world.order(command)
        if status == 0 and command != "status":
            world.paused = world.mono if command == "pause" else None
            for trainer in lively:
                if trainer.returncode is None:
                    assert trainer.pause.on == (command == "pause"), (
                        command,
                        trainer.pid,
                    )
        if quiet and lively and not hung:
            assert status == 0, command

    def resumes(self):
        """End all faults and reset the switches; do nothing else."""
        world = self.world
        for trainer in world.trainers:
            trainer.hung = False
        if not world.engines:
            Engine(world)
        world.run(RESUME_S)
        world.off = world.paused = None
        assert world.order("capture", "on") == 0
        assert world.order("resume") == 0
        before = {id(t): t.fresh for t in world.trainers}
        world.run(3.0)
        assert world.wrong == []
        assert [t for t in world.lively if t.fresh > before.get(id(t), 0)]


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    MODELS[:] = [make_models(tmp_path_factory.mktemp("models"))]


def promises(examples, steps):
    run_state_machine_as_test(
        Commands,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_commands_keep_their_guarantees_under_faults():
    promises(20, 20)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_commands_keep_their_guarantees_under_many_faults():
    promises(600, 40)
