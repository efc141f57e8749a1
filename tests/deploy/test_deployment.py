"""Publishing, the canary's verdict, and what survives a restart, on shared memory."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch

from tests.sidecar.test_sidecar import TOY, VOCAB, Engine, attach
from tests.transport.samples import write_record
from vllm_tide.deploy.deployment import master_of
from vllm_tide.draft.checkpoint import canonical_name
from vllm_tide.train.assemble import VERIFY
from vllm_tide.train.judgement import CycleResult
from vllm_tide.transport.record import Record
from vllm_tide.transport.shm import TransportError


@pytest.fixture
def engine(tmp_path, monkeypatch):
    # However slow the machine, every tick looks at the canary.
    monkeypatch.setattr("vllm_tide.deploy.deployment.LOOK_SHARE", math.inf)
    made = Engine(tmp_path)
    yield made
    made.close()


def serve(engine: Engine, requests: int, version: int, accepted: int) -> None:
    """Requests of 8 rounds, 4 drafts each, `accepted` of them taken."""
    for _ in range(requests):
        key = engine._random.getrandbits(64)
        doc = TOY.document(engine._random.randrange(VOCAB), 60, 3, key)
        at = 3
        while at + 5 < 60:
            part = slice(at, at + 5)
            record = Record(
                key, VERIFY, at, 3, accepted, -1, version, doc.tokens[part].numpy(),
                doc.features[part].numpy(), 0,
                doc.teacher_hidden[part].numpy(), finished=at + 10 >= 60,
            )  # fmt: skip
            assert write_record(engine.ring, record)
            at += 1 + accepted
            if record.finished:
                break


def events(engine: Engine) -> list[dict]:
    lines = (engine.run_dir / "events-test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def published_once(engine: Engine):
    """A sidecar whose first publication is installed."""
    serve(engine, 120, 0, 4)
    sidecar = attach(engine)
    assert sidecar._tick()
    sidecar._train()
    assert engine.weights.latest_version() == 1
    engine.weights.report(1, 0, "", 2.0)
    assert sidecar._tick()
    return sidecar


def test_a_head_that_serves_worse_is_taken_back(engine):
    sidecar = published_once(engine)
    before = sidecar.deployment._masters[0]
    assert sidecar.deployment.canary.undecided
    assert sidecar.deployment.waiting_for == ""  # learning is not held back
    serve(engine, 60, 1, 1)
    assert sidecar._tick()
    assert engine.weights.latest_version() == 2
    back = master_of(engine.weights.read())
    for name, tensor in back.items():
        assert torch.equal(tensor, before[name].to(tensor.dtype))
    live = sidecar.trainer.snapshot()
    assert all(torch.equal(live[name], before[name]) for name in before)
    told = [e for e in events(engine) if e["event"] == "rollback"]
    assert (told[0]["version"], told[0]["to"]) == (1, 0)
    # The head put back is not on trial, and nothing is published for a while.
    engine.weights.report(2, 0, "", 2.0)
    assert sidecar._tick()
    assert not sidecar.deployment.canary.undecided
    assert "after a rollback" in sidecar.deployment.waiting_for
    assert not list((engine.run_dir / "heads").glob("*.safetensors"))


def test_a_head_that_serves_better_is_kept_and_survives_a_restart(engine):
    sidecar = published_once(engine)
    serve(engine, 160, 1, 4)
    assert sidecar._tick()
    assert not sidecar.deployment.canary.undecided
    assert engine.weights.latest_version() == 1
    assert [e["version"] for e in events(engine) if e["event"] == "keep"] == [1]
    kept = sidecar.trainer.snapshot()
    sidecar.feeds.close()
    # The server comes back with the checkpoint it was started with.
    engine.weights.close()
    engine.restart()
    again = attach(engine)
    assert engine.weights.latest_version() == 1
    live = again.trainer.snapshot()
    assert all(torch.equal(live[name], kept[name]) for name in kept)
    sent = engine.weights.read()
    assert all(
        torch.equal(tensor, kept[canonical_name(name)])
        for name, tensor in master_of(sent).items()
    )
    again.feeds.close()


def test_a_head_that_cannot_be_sent_stops_nothing(engine, monkeypatch):
    sidecar = published_once(engine)
    before = sidecar.deployment._masters[0]
    feed = sidecar.feeds.reference

    def full(*_args, **_more):
        raise TransportError("no space left")

    monkeypatch.setattr("vllm_tide.deploy.deployment.RETRY_S", 0.0)
    monkeypatch.setattr(feed, "publish", full)
    serve(engine, 60, 1, 1)
    assert sidecar._tick()  # it would go back, and cannot
    assert engine.weights.latest_version() == 1
    assert "no engine could be sent" in sidecar.deployment.waiting_for
    assert sidecar._tick()
    assert [
        e["rollback_of"] for e in events(engine) if e["event"] == "unpublished"
    ] == [1]
    monkeypatch.undo()
    assert sidecar._tick()
    back = master_of(engine.weights.read())
    assert all(torch.equal(t, before[name].to(t.dtype)) for name, t in back.items())
    assert "after a rollback" in sidecar.deployment.waiting_for


def test_a_rollback_that_is_refused_leaves_the_good_weights(engine):
    sidecar = published_once(engine)
    before = sidecar.deployment._masters[0]
    serve(engine, 60, 1, 1)
    assert sidecar._tick()
    assert engine.weights.latest_version() == 2
    engine.weights.report(1, 2, "for a reason", 2.0)
    assert sidecar._tick()
    assert [e["back_to"] for e in events(engine) if e["event"] == "refused"] == [0]
    live = sidecar.trainer.snapshot()
    assert all(torch.equal(live[name], before[name]) for name in before)
    assert sidecar.deployment.good == 0


def test_a_stored_head_that_is_refused_is_forgotten(engine):
    sidecar = published_once(engine)
    serve(engine, 160, 1, 4)
    assert sidecar._tick()
    sidecar.feeds.close()
    engine.weights.close()
    engine.restart()
    again = attach(engine)
    assert engine.weights.latest_version() == 1
    heads = engine.run_dir / "heads"
    assert list(heads.glob("*.safetensors"))
    engine.weights.report(0, 1, "for a reason", 0.0)
    assert again._tick()
    assert again.deployment.good == again.deployment.published == 0
    assert not list(heads.glob("*.safetensors"))
    again.feeds.close()


def test_a_stored_head_that_cannot_be_sent_stops_nothing(engine, monkeypatch):
    sidecar = published_once(engine)
    serve(engine, 160, 1, 4)
    assert sidecar._tick()
    sidecar.feeds.close()
    engine.weights.close()
    engine.restart()

    def full(*_args, **_more):
        raise TransportError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("vllm_tide.transport.feed.RingFeed.publish", full)
        again = attach(engine)
    assert again.deployment.published == 0
    assert again._tick()
    again.feeds.close()


def test_a_candidate_that_cannot_be_sent_is_offered_again(engine, monkeypatch):
    serve(engine, 20, 0, 4)
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick()

    def full(*_args, **_more):
        raise TransportError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(sidecar.feeds.reference, "publish", full)
        sidecar._train()
    assert [e["reason"] for e in events(engine) if e["event"] == "unpublished"] == [
        "no space left"
    ]
    assert sidecar.deployment.published == 0
    engine.serve(30)
    assert sidecar._tick()
    sidecar._train()
    # A number is used once, whether anybody was sent the head or not.
    assert sidecar.deployment.published == engine.weights.latest_version() == 2


def test_without_a_canary_a_head_is_kept_at_once(engine):
    engine.manifest.tide["deploy"] = {"canary": False}
    engine.announce()
    sidecar = published_once(engine)
    assert not sidecar.deployment.canary.undecided
    assert list((engine.run_dir / "heads").glob("*.safetensors"))


def test_publications_keep_their_distance(engine):
    engine.manifest.tide["deploy"] = {"canary": False, "min_requests": 10_000}
    engine.announce()
    sidecar = published_once(engine)
    engine.serve(60)
    assert sidecar._tick()
    sidecar._train()
    assert engine.weights.latest_version() == 1
    assert "spacing" in sidecar.deployment.waiting_for


def test_gated_mode_asks_for_metadata_records_until_something_shifts(
    engine, monkeypatch
):
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
    shift = [e for e in events(engine) if e["event"] == "shift"]
    assert "fell from" in shift[0]["reason"]
    status = json.loads((engine.run_dir / "trainer-test.json").read_text())
    assert status["schedule"]["mode"] == "tide"
    sidecar.feeds.close()


def test_a_purge_is_answered_and_leaves_nothing(engine):
    from vllm_tide.transport import purge

    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick()
    assert sidecar.trainer.buffer.train_tokens
    request = purge.ask(engine.run_dir, None)
    sidecar._next_purge = 0.0
    engine.serve(5)
    assert sidecar._tick()
    assert not sidecar.trainer.buffer.train_tokens
    assert not sidecar.trainer.buffer.holdout_tokens
    (counts,) = purge.answers(engine.run_dir, request).values()
    assert counts["tokens"] > 0
    sidecar.feeds.close()


def test_a_checkpoint_of_the_live_version_is_gone_on_from(engine):
    engine.manifest.tide["train"] |= {"checkpoint_cycles": 1}
    engine.manifest.tide["deploy"] = {"canary": False}
    engine.announce()
    sidecar = published_once(engine)
    steps = sidecar.trainer.steps
    sidecar._save_checkpoint()
    sidecar.feeds.close()
    again = attach(engine)
    assert again.trainer.steps == steps
    moments = again.trainer.stepper.step.optimizer.state
    assert moments and all(float(s["step"]) == steps for s in moments.values())
    again.feeds.close()


def test_the_trainers_own_metrics_have_every_figure(engine):
    import urllib.request

    from bench.harness.server import free_port
    from vllm_tide.metrics import TRAINER, samples_of
    from vllm_tide.sidecar.report import open_metrics

    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick()
    sidecar._train()
    sidecar._update_status(force=True)
    port = free_port()
    open_metrics(port, lambda: sidecar.status, "127.0.0.2")
    began = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics") as page:
        text = page.read().decode()
    assert time.monotonic() - began < 10
    assert all(f"{name} " in text for m in TRAINER for name in samples_of(m))
    assert (
        'vllm_tide:trainer_engine_version{engine_id="test",model_name=""} 0.0' in text
    )
    sidecar.feeds.close()


def test_a_served_head_whose_weights_are_lost_gives_way_to_a_known_one(engine):
    engine.weights.report(5)  # and the segment is empty
    sidecar = attach(engine)
    assert engine.weights.latest_version() == 6
    first = sidecar.trainer.snapshot()
    sent = master_of(engine.weights.read())
    assert all(torch.equal(t, first[n].to(t.dtype)) for n, t in sent.items())
    (told,) = [e for e in events(engine) if e["event"] == "restored"]
    assert (told["version"], told["stored"]) == (6, 0)
    engine.weights.report(6, 0, "", 2.0)
    assert sidecar._tick()
    assert sidecar.deployment.good == 6 and not sidecar.deployment.canary.undecided
    sidecar.feeds.close()


def test_a_better_head_supersedes_one_under_canary_and_a_rollback_skips_both(engine):
    sidecar = published_once(engine)
    deployment = sidecar.deployment
    first = deployment._masters[0]
    result = CycleResult(
        steps=1, loss=0.0, new=None, live=None, gain=0.1, gain_error=0.0,
        publish=True, reason="better",
    )  # fmt: skip
    deployment.offer(result, time.monotonic())
    assert engine.weights.latest_version() == 2
    engine.weights.report(2, 0, "", 2.0)
    assert sidecar._tick()
    assert deployment.canary.undecided and deployment.good == 0
    serve(engine, 60, 2, 1)
    assert sidecar._tick()
    assert engine.weights.latest_version() == 3
    back = master_of(engine.weights.read())
    assert all(torch.equal(t, first[name].to(t.dtype)) for name, t in back.items())
    told = [e for e in events(engine) if e["event"] == "rollback"]
    assert [(e["version"], e["to"]) for e in told] == [(2, 0)]
    assert "served speed over plain" in told[0]["reason"]
    sidecar._update_status(force=True)
    status = json.loads((engine.run_dir / "trainer-test.json").read_text())
    assert status["canary"]["change"] < -0.5 < 0 < status["canary"]["error"]


def test_open_requests_are_looked_at_without_any_that_ends(engine, monkeypatch):
    sidecar = published_once(engine)
    looked = []
    canary = sidecar.deployment.canary
    monkeypatch.setattr(canary, "look", lambda others: looked.append(list(others)))
    for key in range(4):
        record = Record(
            key, VERIFY, 3, 3, 1, -1, 1, np.zeros(5, np.int32),
            TOY.document(0, 5, 3, key).features.numpy(),
            5, np.empty((0, 0), np.uint16),
        )  # fmt: skip
        sidecar._served.add(record, "test", 0.0)
    sidecar.deployment.tick()
    assert len(looked[-1]) == 4


def test_a_head_put_back_during_a_trial_ends_it(engine):
    sidecar = published_once(engine)
    deployment = sidecar.deployment
    assert deployment.canary.undecided
    deployment.put_back(deployment._masters[0], {})
    engine.weights.report(2, 0, "", 2.0)
    assert sidecar._tick()
    assert not deployment.canary.undecided and deployment.canary.may_publish
    sidecar.feeds.close()
