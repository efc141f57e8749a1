"""Publication, the canary's verdict, and state after a restart, on shared memory."""

from __future__ import annotations

import errno
import json
import math
import time
import urllib.request
from dataclasses import asdict

import pytest
import torch

from bench.harness.server import free_port
from tests.dashboards.known import samples_of
from tests.sidecar.test_sidecar import TOY, VOCAB, Engine, attach
from tests.transport.samples import write_record
from vllm_tide.cli.trainer import status_text
from vllm_tide.draft.kind import canonical
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.metrics import TRAINER
from vllm_tide.sidecar.report import open_metrics
from vllm_tide.train.assemble import VERIFY
from vllm_tide.train.judgement import CycleResult
from vllm_tide.transport.record import Record
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.versions import first_version

BETTER = CycleResult(
    steps=1, loss=0.0, new=None, live=None, gain=0.1, gain_error=0.0,
    publish=True, reason="better",
)  # fmt: skip


@pytest.fixture
def engine(tmp_path, monkeypatch):
    # However slow the machine, every tick takes all records and checks the canary.
    monkeypatch.setattr("vllm_tide.deploy.deployment.CANARY_TIME_SHARE", math.inf)
    monkeypatch.setattr("vllm_tide.sidecar.loop.LIMIT_S", math.inf)
    made = Engine(tmp_path)
    yield made
    made.close()


def serve(engine: Engine, requests: int, version: int, accepted: int) -> None:
    """Requests of 8 steps, 4 drafts each, `accepted` of them accepted."""
    sent = first_version(version)
    for _ in range(requests):
        key = engine._random.getrandbits(64)
        doc = TOY.document(engine._random.randrange(VOCAB), 60, 3, key)
        at = 3
        while at + 5 < 60:
            part = slice(at, at + 5)
            record = Record(
                key, VERIFY, at, 3, accepted, -1, sent, doc.tokens[part].numpy(),
                doc.features[part].numpy(), 0,
                doc.teacher_hidden[part].numpy(), finished=at + 10 >= 60,
            )  # fmt: skip
            assert write_record(engine.ring, record)
            at += 1 + accepted
            if record.finished:
                break


def events(engine: Engine, *names: str) -> list[dict]:
    """Return its events of these names, or all."""
    lines = (engine.run_dir / "events-test.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if not names or e["event"] in names]


def offer(sidecar) -> None:
    """Offer another candidate that scored better."""
    for weight in sidecar.trainer.draft.named_tensors().values():
        weight.data.mul_(1.01)
    sidecar.deployment.offer(BETTER, time.monotonic())


def published_once(engine: Engine):
    """A sidecar with its first publication installed, and the weights before it."""
    serve(engine, 60, 0, 4)
    sidecar = attach(engine)
    assert sidecar._tick()
    before = sidecar.trainer.snapshot()
    offer(sidecar)
    assert engine.latest == 1
    engine.report(1)
    assert sidecar._tick()
    return sidecar, before


def assert_sent(engine: Engine, weights: dict[str, torch.Tensor]) -> None:
    sent = canonical(from_bytes(engine.weights.read().tensors))
    for name, tensor in sent.items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name


def assert_live(sidecar, weights: dict[str, torch.Tensor]) -> None:
    live = sidecar.trainer.snapshot()
    assert all(torch.equal(live[name], weights[name]) for name in weights)


def heads(engine: Engine) -> list:
    return list((engine.run_dir / "heads").glob("*.safetensors"))


def full(*_args, **_more):
    raise TransportError("no space left")


def test_a_draft_that_serves_worse_is_rolled_back(engine):
    sidecar, before = published_once(engine)
    deployment = sidecar.deployment
    assert deployment.canary.undecided
    assert deployment.waiting_for == ""  # training is not delayed
    serve(engine, 24, 1, 1)
    assert sidecar._tick()
    assert engine.latest == 2
    assert_sent(engine, before)
    assert_live(sidecar, before)
    (event,) = events(engine, "rollback")
    assert (event["version"], event["to"]) == (1, 0)
    # The restored draft is in no canary, and nothing is published for a while.
    engine.report(2)
    assert sidecar._tick()
    assert not deployment.canary.undecided
    assert "after a rollback" in deployment.waiting_for
    assert not heads(engine)
    offer(sidecar)
    assert engine.latest == 2


def test_a_draft_that_serves_better_stays_and_survives_a_restart(engine, monkeypatch):
    sidecar, _ = published_once(engine)
    serve(engine, 160, 1, 4)
    assert sidecar._tick()
    assert not sidecar.deployment.canary.undecided
    assert engine.latest == 1
    assert [e["version"] for e in events(engine, "keep")] == [1]
    snapshot = sidecar.trainer.snapshot()
    sidecar.feeds.close()
    # The server restarts with the checkpoint it was started with.
    engine.weights.close()
    engine.restart()
    with monkeypatch.context() as patched:
        patched.setattr("vllm_tide.transport.feed.RingFeed.publish", full)
        again = attach(engine)
    assert again.deployment.published == 0  # it could not be sent, and nothing stops
    assert again._tick()
    again.feeds.close()
    again = attach(engine)
    assert engine.latest == 1
    assert_live(again, snapshot)
    assert_sent(engine, snapshot)
    # An engine that refuses it does not receive it for ever.
    assert heads(engine)
    engine.report(0, 1, "for a reason")
    assert again._tick()
    assert again.deployment.good == again.deployment.published == 0
    assert not heads(engine)


def test_a_restored_draft_has_its_figures_and_its_earlier_version(engine):
    sidecar, _ = published_once(engine)
    offer(sidecar)
    engine.report(2)
    assert sidecar._tick()
    serve(engine, 160, 2, 4)
    assert sidecar._tick()
    sidecar.feeds.close()
    engine.weights.close()
    engine.restart()
    again = attach(engine)
    again._update_status(force=True)
    text = status_text(asdict(again.status))
    assert "version 0 served; version 1 (stored as version 2) is installed with" in text
    engine.report(1)
    assert again._tick()
    assert engine.weights.read().meta["gain"] == BETTER.gain
    assert again.deployment.origin == "stored as version 2"
    assert again.deployment.publications == 0
    again._update_status(force=True)
    text = status_text(asdict(again.status))
    assert "version 1 served (stored as version 2)" in text
    offer(again)
    engine.report(2)
    assert again._tick()
    answer = again.deployment.rollback("ordered")
    assert (answer["version"], answer["to"], answer["stored"]) == (2, 1, 2)
    assert again.deployment.canary._oldest == answer["served_as"] == 3
    engine.report(2, 3, "for a reason")  # as without memory for a moment
    assert again._tick()
    assert heads(engine)


def test_a_restarted_trainer_rolls_back_to_the_initial_draft(engine, monkeypatch):
    sidecar, before = published_once(engine)
    sidecar.feeds.close()
    again = attach(engine)  # nothing is stored before the canary's verdict
    assert again.deployment.published == 1
    assert again.deployment.rollback("ordered")["to"] == 0
    assert_live(again, before)
    again._update_status(force=True)
    text = status_text(asdict(again.status))
    assert "rolled back: 1 (1 by command);" in text
    assert "version 2 (the initial draft) is installed with the next step" in text
    assert again.deployment.publications == 0  # only trained drafts count
    assert_sent(engine, before)
    again.feeds.close()
    # A draft that a file has in another form: t2d is not trained.
    third = attach(engine)
    assert third.deployment.origin == "the initial draft"
    live = third.trainer.live_tensors
    extra = {"t2d": torch.ones(4, dtype=torch.bool)}
    monkeypatch.setattr(third.trainer, "live_tensors", lambda: live() | extra)
    with pytest.raises(TransportError, match="version 2 is the initial draft"):
        third.deployment.rollback("ordered")


def test_a_store_without_locks_does_not_end_the_trainer(engine, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("vllm_tide.deploy.store.take_lock", none)
    attach(engine).feeds.close()


def test_two_trainers_with_one_store_are_logged(engine):
    first = attach(engine)
    first.feeds.close()
    attach(engine).feeds.close()
    (event,) = events(engine, "state_dir_shared")
    assert "set another tide.train.state_dir" in event["reason"]


def test_a_new_number_waits_for_the_canary_and_needs_none(engine):
    """For an engine that joined with a higher number, of another trainer."""
    serve(engine, 60, 0, 4)
    sidecar = attach(engine)
    assert sidecar._tick()
    offer(sidecar)
    sidecar.feeds.needs_new_number = True
    assert sidecar._tick() and engine.latest == 1  # it is not installed yet
    engine.report(1)
    assert sidecar._tick() and engine.latest == 1
    serve(engine, 160, 1, 4)
    assert sidecar._tick() and not sidecar.deployment.canary.undecided
    live = sidecar.trainer.snapshot()
    assert sidecar._tick() and engine.latest == 2
    assert_sent(engine, live)
    engine.report(2)
    assert sidecar._tick() and engine.latest == 2
    assert sidecar.deployment.good == 2 and not sidecar.deployment.canary.undecided


def test_a_rollback_that_cannot_be_sent_is_retried(engine, monkeypatch):
    sidecar, before = published_once(engine)
    monkeypatch.setattr("vllm_tide.deploy.deployment.RETRY_S", 0.0)
    monkeypatch.setattr(sidecar.feeds.reference, "publish", full)
    serve(engine, 24, 1, 1)
    assert sidecar._tick()
    assert engine.latest == 1
    assert "no engine has received" in sidecar.deployment.waiting_for
    assert sidecar._tick()
    assert [e["rollback_of"] for e in events(engine, "unpublished")] == [1]
    monkeypatch.undo()
    assert sidecar._tick()
    assert_sent(engine, before)
    assert "after a rollback" in sidecar.deployment.waiting_for


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_refused_draft_leaves_the_good_weights(engine, rolled_back):
    """Also if the refused draft is the one that a rollback restores."""
    if rolled_back:
        sidecar, before = published_once(engine)
        serve(engine, 24, 1, 1)
        assert sidecar._tick()
    else:
        serve(engine, 20, 0, 4)
        sidecar = attach(engine)
        before = sidecar.trainer.snapshot()
        offer(sidecar)
    latest = engine.latest
    assert latest == 1 + rolled_back
    engine.report(int(rolled_back), latest, "for a reason")
    assert sidecar._tick()
    assert [e["back_to"] for e in events(engine, "refused")] == [0]
    assert_live(sidecar, before)
    assert sidecar.deployment.good == 0
    assert sidecar.deployment.refusals == 1


def test_a_candidate_that_cannot_be_sent_is_offered_again(engine, monkeypatch):
    sidecar = attach(engine)
    with monkeypatch.context() as patched:
        patched.setattr(sidecar.feeds.reference, "publish", full)
        offer(sidecar)
    assert [e["reason"] for e in events(engine, "unpublished")] == ["no space left"]
    assert sidecar.deployment.published == 0
    offer(sidecar)
    # A version is used once, even if no engine received the draft.
    assert sidecar.deployment.published == engine.latest == 2


def test_without_a_canary_a_draft_is_accepted_at_once(engine):
    engine.manifest.tide["deploy"] = {"canary": False, "min_requests": 10_000}
    engine.announce()
    sidecar, _ = published_once(engine)
    assert not sidecar.deployment.canary.undecided
    assert heads(engine)
    offer(sidecar)
    assert engine.latest == 1
    assert "spacing" in sidecar.deployment.waiting_for


def test_mode_tide_collects_metadata_until_a_shift(engine, monkeypatch):
    monkeypatch.setattr("vllm_tide.deploy.schedule.INIT_REQUESTS", 4)
    engine.manifest.tide["schedule"] = {"mode": "tide"}
    engine.announce()
    sidecar = attach(engine)
    assert not engine.ring.collect
    serve(engine, 30, 0, 4)
    assert sidecar._tick()
    assert not sidecar.schedule.collecting and not sidecar._may_train()
    serve(engine, 10, 0, 0)
    assert sidecar._tick()
    assert sidecar.schedule.collecting and engine.ring.collect
    assert "fell from" in events(engine, "shift")[0]["reason"]
    assert engine.status()["schedule"]["mode"] == "tide"


def test_a_checkpoint_of_the_live_version_is_resumed(engine):
    engine.manifest.tide["train"] |= {"checkpoint_cycles": 1, "steps_per_cycle": 2}
    engine.manifest.tide["deploy"] = {"canary": False}
    engine.announce()
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick()
    sidecar._train()
    offer(sidecar)
    steps = sidecar.trainer.steps
    sidecar._save_checkpoint()
    sidecar.feeds.close()
    again = attach(engine)
    assert again.trainer.steps == steps == 2
    moments = again.trainer.stepper.step.optimizer.state
    assert moments and all(float(s["step"]) == steps for s in moments.values())


def test_the_trainers_own_metrics_have_every_figure(engine):
    engine.manifest.tide["train"] |= {"steps_per_cycle": 2}
    engine.announce()
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick()
    sidecar._train()
    offer(sidecar)
    sidecar._update_status(force=True)
    port = free_port()
    open_metrics(port, lambda: sidecar.status, "127.0.0.2")
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics") as page:
        text = page.read().decode()
    assert all(f"{name} " in text for m in TRAINER for name in samples_of(m))
    assert (
        'vllm_tide:trainer_engine_version{engine_id="test",model_name=""} 0.0' in text
    )


def test_a_served_draft_with_lost_weights_is_replaced_by_a_stored_one(engine):
    engine.report(5)  # and the segment is empty
    sidecar = attach(engine)
    assert engine.latest == 6
    assert_sent(engine, sidecar.trainer.snapshot())
    (event,) = events(engine, "restored")
    assert (event["version"], event["stored"]) == (6, 0)
    engine.report(6)
    assert sidecar._tick()
    assert sidecar.deployment.good == 6 and not sidecar.deployment.canary.undecided


def test_a_rollback_skips_a_canary_draft_and_its_better_successor(engine):
    sidecar, first = published_once(engine)
    deployment = sidecar.deployment
    offer(sidecar)
    assert engine.latest == 2
    engine.report(2)
    assert sidecar._tick()
    assert deployment.canary.undecided and deployment.good == 0
    serve(engine, 24, 2, 1)
    assert sidecar._tick()
    assert engine.latest == 3
    assert_sent(engine, first)
    (event,) = events(engine, "rollback")
    assert (event["version"], event["to"]) == (2, 0)
    assert "served speed over plain" in event["reason"]
    sidecar._update_status(force=True)
    canary = engine.status()["canary"]
    assert canary["change"] < -0.5 < 0 < canary["error"]
