"""The fast draft: published, judged, replaced by its base, never lost."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from tests.deploy.test_deployment import events, full
from tests.deploy.test_fast_draft import Stream
from tests.sidecar.test_sidecar import KNOBS, Engine, attach
from tests.train.toys import weights_of
from tests.transport.samples import write_record
from tests.transport.spool_toys import head_tensors
from vllm_tide.deploy import fast_draft
from vllm_tide.deploy.deployment import DraftState
from vllm_tide.deploy.fast_draft import FastStep
from vllm_tide.draft.checkpoint import export_tensors
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.train.gpu import GpuTimeBudget
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.versions import first_version, is_fast, number_of

ADAPT = {"adapt": "shared", "stride": 16, "min_tokens": 8}


class Serving(Engine):
    """An engine with open requests."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        tide = {"train": KNOBS, "test_time": ADAPT}
        self.manifest = replace(self.manifest, tide=tide)
        self.announce()
        self.streams: list[Stream] = []
        self.version = 0
        self.sidecars: list = []

    def attach(self):
        self.sidecars.append(attach(self))
        return self.sidecars[-1]

    def close(self) -> None:
        for sidecar in self.sidecars:
            sidecar.feeds.close()
        super().close()

    def begin(self, *keys: int) -> None:
        for key in keys:
            self.streams.append(Stream(key, key))
            assert write_record(self.ring, self.streams[-1].prefill())

    def go(self, num_steps: int = 1, **more) -> None:
        for _ in range(num_steps):
            for stream in self.streams:
                made = replace(stream.verify(**more), draft_version=self.version)
                assert write_record(self.ring, made)
        if more:
            self.streams = []

    def install(self) -> None:
        self.version = self.weights.latest_version()
        self.weights.report(self.version, 0, "", 1.0)

    def sent(self):
        return self.weights.read()


@pytest.fixture
def engine(tmp_path):
    made = Serving(tmp_path)
    yield made
    made.close()


def learn(sidecar, engine, least: int = 1) -> None:
    """Serve until so many steps were made."""
    until = sidecar.fast.steps + least
    for _ in range(10_000):
        engine.go()
        assert sidecar._tick()
        if sidecar.fast.steps >= until:
            return
    raise AssertionError("nothing was learnt")


def adapted(engine: Serving):
    """Return a sidecar that has sent a fast draft."""
    sidecar = engine.attach()
    engine.begin(1, 2, 3)
    for _ in range(200):
        learn(sidecar, engine)
        if engine.weights.latest_version():
            return sidecar
    raise AssertionError("nothing was sent")


def served(engine: Serving):
    """Return a sidecar with a fast draft that an engine serves."""
    sidecar = adapted(engine)
    engine.install()
    assert sidecar._tick()
    return sidecar


def has_weights(sent, draft) -> bool:
    """Return whether the weights sent are a draft's, by stored name."""
    tensors, want = from_bytes(sent.tensors), export_tensors(draft, stored_names=True)
    assert tensors.keys() == want.keys() - {"t2d"}
    return all(torch.equal(t, want[name]) for name, t in tensors.items())


def is_base(sidecar, sent) -> bool:
    return not is_fast(sent.version) and has_weights(sent, sidecar.trainer.live)


def test_a_fast_draft_is_served_and_the_base_is_restored(engine):
    sidecar = served(engine)
    live = weights_of(sidecar.trainer.live)
    first, fast = engine.sent(), sidecar.fast
    assert is_fast(first.version) and number_of(first.version) == 0
    assert has_weights(first, fast.served)  # that draft is judged
    # It was better before it was sent, on rows that it had not learned.
    (event,) = events(engine, "adapted")
    assert event["gain"] > 0 and event["base"] == 0
    figures = fast.figures
    assert figures["state"] == "serving" and figures["gain"] > 0
    assert figures["requests"] == 3
    sidecar._update_status(force=True)
    assert engine.status()["adaptation"] == pytest.approx(figures)
    # Its requests are the base's, no draft is in a canary, and its steps do not count.
    assert sidecar.deployment.installed == sidecar.deployment.published == 0
    assert not sidecar.deployment.canary.undecided

    def tokens() -> float:
        requests = sidecar._served._open.values()
        return sum(made for r in requests for made, _ in r.cells.values())

    before = tokens()
    engine.go(20)
    assert sidecar._tick() and tokens() == before > 0
    assert {v for r in sidecar._served._open.values() for v in r.versions} == {0}
    # A newer one follows once this one is installed.
    for _ in range(2):
        learn(sidecar, engine, 2)
        assert engine.weights.latest_version() == first.version + 2
    engine.install()
    learn(sidecar, engine)  # rows that the fast draft drafted
    # The long requests end.
    engine.go(finished=True)
    assert sidecar._tick()
    back = engine.sent()
    assert number_of(back.version) == 0 and is_base(sidecar, back)
    assert fast.draft is None and fast.figures["state"] == "waiting"
    assert torch.equal(weights_of(sidecar.trainer.live), live)
    engine.install()
    assert sidecar._tick()
    assert engine.weights.latest_version() == back.version
    assert [e["reason"] for e in events(engine, "given_back")] == [
        "the long requests have ended"
    ]


def test_it_learns_during_a_cycle_and_an_evaluation(engine):
    engine.manifest.tide["train"] = KNOBS | {"steps_per_cycle": 4}
    engine.announce()
    engine.serve(80)
    sidecar = engine.attach()
    assert sidecar._tick()
    engine.begin(1, 2)
    ticks, learnt = sidecar._tick, []

    def tick() -> bool:
        engine.go()
        before = sidecar.fast.steps
        assert ticks()
        learnt.append(sidecar.fast.steps > before)
        return True

    sidecar._tick = tick
    sidecar._train()
    assert sidecar.trainer.cycles == 1 and sidecar.trainer.steps > 0
    for _ in range(1000):
        sidecar.trainer.evaluate(progress=tick)
        if any(learnt):
            break
    assert any(learnt)


def test_a_fast_draft_that_is_worse_than_its_base_is_replaced(engine, monkeypatch):
    sidecar = served(engine)
    evaluate, fast = sidecar.trainer.evaluate, sidecar.fast.served

    def worse(draft=None, *args, **more):
        """A toy accepts too few tokens to lose many: one less for each."""
        evaluation = evaluate(draft, *args, **more)
        for row in evaluation.requests.values() if draft is fast else ():
            row[1:] = [accepted - row[0] for accepted in row[1:]]
        return evaluation

    monkeypatch.setattr(sidecar.trainer, "evaluate", worse)
    for _ in range(20):
        learn(sidecar, engine)
        engine.install()
        if events(engine, "given_back"):
            break
    (event,) = events(engine, "given_back")
    assert event["reason"] == "no better than its base" and event["gain"] <= 0
    assert is_base(sidecar, engine.sent())
    assert sidecar.fast.figures["state"] == "learning"


@pytest.mark.parametrize("how", ["pause", "purge", "rollback", "refused"])
def test_causes_that_drop_the_fast_draft(engine, how):
    sidecar = served(engine)
    learnt = sidecar.fast.draft
    if how == "pause":
        assert sidecar.execute({"do": "pause"})["ok"]
    elif how == "purge":
        assert sidecar.execute({"do": "purge", "tenant": None})["ok"]
    elif how == "rollback":
        master = sidecar.trainer.snapshot()
        sidecar.deployment.republish(DraftState(master), {"rollback_of": 1})
    else:
        learn(sidecar, engine, 2)
        latest = engine.weights.latest_version()
        assert latest > engine.version
        engine.weights.report(engine.version, latest, "norm", 1.0)
    for _ in range(3):
        assert sidecar._tick()
    assert sidecar.fast.draft is not learnt
    sent = engine.sent()
    assert is_base(sidecar, sent)
    assert sidecar.deployment.refusals == 0
    assert len(events(engine, "given_back")) == 1


def test_a_refused_base_is_sent_again_and_logged_once(engine, monkeypatch, caplog):
    monkeypatch.setattr(fast_draft, "RETRY_S", 0.0)
    sidecar = served(engine)
    feed = sidecar.feeds.reference
    engine.go(finished=True)

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(feed, "publish", full)
        for _ in range(3):
            assert sidecar._tick()
    messages = [r for r in caplog.records if "base of the fast draft" in r.getMessage()]
    assert len(messages) == 1
    assert sidecar._tick()
    version = engine.weights.latest_version()
    assert is_base(sidecar, engine.sent()) and version == engine.version + 1
    for _ in range(3):
        engine.weights.report(engine.version, version, "damaged", 1.0)
        assert sidecar._tick()
        assert engine.weights.latest_version() == version + 2
        version += 2
    engine.install()
    assert sidecar._tick()
    assert engine.weights.latest_version() == version


def test_the_fast_draft_is_dropped_without_memory(engine, monkeypatch):
    sidecar = served(engine)

    def out_of_memory(*_args):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(FastStep, "run", out_of_memory)
        for _ in range(10_000):
            engine.go()
            assert sidecar._tick()
            if sidecar.fast.draft is None:
                break
    assert sidecar._tick()
    assert is_base(sidecar, engine.sent())
    steps = sidecar.fast.steps
    engine.go(10)
    for _ in range(5):
        assert sidecar._tick()
    assert sidecar.fast.steps == steps  # it sleeps
    sidecar.fast._memory_backoff._until = 0.0
    learn(sidecar, engine)


def test_a_stop_restores_the_base_and_closes_everything(engine):
    sidecar = served(engine)
    sidecar.stop()
    assert sidecar.run() == "stopped"
    assert len(sidecar.feeds) == 0
    assert is_base(sidecar, engine.sent())


@pytest.mark.parametrize("installed", [True, False])
def test_a_killed_trainer_leaves_nothing_that_the_next_one_uses(engine, installed):
    sidecar = adapted(engine)
    if installed:
        engine.install()
    sidecar.feeds.close()  # without a message
    again = engine.attach()
    sent = engine.sent()
    assert sent.version == first_version(1) and is_base(sidecar, sent)
    assert again.deployment.published == 1
    engine.install()
    assert again._tick()
    assert again.deployment.installed == 1


def test_a_base_without_a_step_left_gets_a_new_number(engine):
    """For example after another draft that its engine refused."""
    sidecar = served(engine)
    feed = sidecar.feeds.reference
    feed.publish(DraftWeights.encode(head_tensors(1), first_version(1)))
    engine.weights.report(engine.version, first_version(1), "norm", 1.0)
    engine.go(finished=True)
    assert sidecar._tick()
    assert engine.sent().version == first_version(2)
    assert is_base(sidecar, engine.sent())
    engine.install()
    assert sidecar._tick()
    assert sidecar.deployment.good == sidecar.deployment.installed == 2
    assert not sidecar.deployment.canary.undecided


def test_publications_take_a_share_of_a_core(engine, monkeypatch):
    monkeypatch.setattr(fast_draft, "PUBLISH_SHARE", 1e-9)
    sidecar = served(engine)
    version = engine.weights.latest_version()
    learn(sidecar, engine, 5)
    assert engine.weights.latest_version() == version
    engine.go(finished=True)  # the base does not wait
    assert sidecar._tick()
    assert is_base(sidecar, engine.sent())


def test_an_engine_with_adaptation_off_gets_no_fast_draft(engine):
    sidecar = engine.attach()
    feed = sidecar.feeds.feed("test")
    feed.manifest = replace(feed.manifest, tide={"test_time": {"adapt": "off"}})
    engine.begin(1, 2, 3)
    for _ in range(200):
        learn(sidecar, engine)
        if sidecar.fast._is_better():
            break
    learn(sidecar, engine)
    assert sidecar.fast._is_better() and not engine.weights.latest_version()
    # Unless the trainer has a section for all engines.
    sidecar.fast._overrides = True
    learn(sidecar, engine)
    assert engine.weights.latest_version()


def test_rows_are_scored_before_they_are_learned(engine, monkeypatch):
    sidecar, order = served(engine), []
    evaluate, run = sidecar.trainer.evaluate, FastStep.run

    def score(draft, samples):
        order.append((draft is sidecar.trainer.live, samples[0].loss_from))
        return evaluate(draft, samples=samples)

    def step(*given):
        order.append("step")
        return run(*given)

    monkeypatch.setattr(sidecar.trainer, "evaluate", score)
    monkeypatch.setattr(FastStep, "run", step)
    learn(sidecar, engine, 3)
    assert order[2::3] == ["step"] * 3 and len(order) == 9
    for new, base in zip(order[::3], order[1::3], strict=True):
        assert (new[0], base[0]) == (False, True) and new[1] == base[1]
    rows = [new[1] for new in order[::3]]
    assert rows == sorted(set(rows))


@pytest.mark.slow
def test_it_leaves_half_of_a_shared_gpu_to_ordinary_training(engine):
    knobs = {**KNOBS, "gpu_share": 0.1}
    tide = {"train": knobs, "test_time": ADAPT}
    engine.manifest = replace(engine.manifest, tide=tide)
    engine.announce()
    sidecar, worked = engine.attach(), []
    sidecar.trainer.gpu_budget = budget = GpuTimeBudget(0.1)
    budget.add_busy = lambda began, busy: worked.append((began, busy))
    engine.begin(1, 2)
    learn(sidecar, engine, 2)
    # It takes a twentieth of the time, and counts it against the other's.
    (began, busy), (again, _) = worked
    assert again >= began + 20 * busy


@pytest.mark.slow
def test_requests_alternate_and_rows_count_once(engine):
    sidecar = engine.attach()
    engine.begin(*range(12))
    window, taught, calls = sidecar.trainer.assembler.window, [], []

    def spy(key, since, context):
        calls.append(key)
        rows = window(key, since, context)
        for sample in rows:
            at = sample.start + sample.valid.nonzero()[:, 0]
            taught.extend((key, position) for position in at.tolist())
        return rows

    sidecar.trainer.assembler.window = spy
    while len(calls) < 27:
        learn(sidecar, engine)
    # All have new rows at any time, more than fit a batch: one after another.
    assert set(calls[:12]) == set(range(12)) == {key for key, _ in taught}
    assert calls[12:27] == calls[:15]
    assert len(taught) == len(set(taught))


def test_half_of_the_learned_change_remains_after_a_half_life(engine):
    sidecar = served(engine)
    fast = sidecar.fast
    base = weights_of(sidecar.trainer.live)
    before = weights_of(fast.draft) - base
    for _ in range(4):
        fast._decay(2048)
    torch.testing.assert_close(weights_of(fast.draft) - base, before / 2)
    fast._decay(1 << 30)
    assert torch.equal(weights_of(fast.draft), base)
