"""Status, pause, resume and rollback on a trainer with a real ring."""

import os
import threading

import pytest
import torch

from tests.deploy.test_deployment import events, published_once, serve
from tests.sidecar.test_sidecar import Engine, attach
from vllm_tide.cli.main import main
from vllm_tide.deploy.deployment import master_of
from vllm_tide.transport.ring import Collect


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.close()


def order(sidecar, what):
    return sidecar.carry_out({"do": what})


def weights_of(engine):
    return {n: t.clone() for n, t in master_of(engine.weights.read()).items()}


def equal(sent, master):
    return all(torch.equal(t, master[name].to(t.dtype)) for name, t in sent.items())


def test_a_head_on_trial_is_rolled_back_to_the_one_before(engine):
    sidecar = published_once(engine)
    first = sidecar.deployment._masters[0]
    assert order(sidecar, "rollback") == {
        "ok": True, "version": 1, "to": 0, "served_as": 2,
    }  # fmt: skip
    assert equal(weights_of(engine), first)
    engine.weights.report(2)
    assert sidecar._tick()
    assert not sidecar.deployment.canary.undecided
    assert "after a rollback" in sidecar.deployment.waiting_for
    assert sidecar.status.rollbacks == 1 or sidecar.deployment.canary.rollbacks == 1
    (told,) = [e for e in events(engine) if e["event"] == "rollback"]
    assert (told["version"], told["to"], told["reason"]) == (1, 0, "ordered")
    sidecar.feeds.close()


def test_a_kept_head_is_rolled_back_and_does_not_return(engine):
    sidecar = published_once(engine)
    first = sidecar.deployment._masters[0]
    serve(engine, 40, 1, 4)
    assert sidecar._tick()  # kept, and stored
    store = engine.run_dir / "heads"
    assert list(store.glob("*.safetensors"))
    assert order(sidecar, "rollback")["to"] == 0
    assert equal(weights_of(engine), first)
    assert not list(store.glob("*.safetensors"))
    again = order(sidecar, "rollback")
    assert not again["ok"] and "nothing was rolled back" in again["error"]
    sidecar.feeds.close()


def test_rollback_after_rollback_goes_on_to_older_heads_whatever_their_numbers(engine):
    sidecar = published_once(engine)
    store = sidecar.deployment._store
    live = sidecar.trainer.live_tensors()
    older = {name: 0.5 * tensor for name, tensor in live.items()}
    store.put(older, 1)  # of another server: its numbers begin anew
    serve(engine, 40, 1, 4)
    assert sidecar._tick()  # version 1 is kept, and stored
    assert len(list(store.drafts())) == 2
    assert order(sidecar, "rollback")["to"] == 0
    (left,) = store.drafts()
    assert equal(left.tensors, older)
    assert order(sidecar, "rollback")["to"] == 1
    assert equal(weights_of(engine), older)
    assert not order(sidecar, "rollback")["ok"]
    sidecar.feeds.close()


def test_an_order_that_fails_is_answered_and_ends_nothing():
    from vllm_tide.transport.admin import _answered

    def broken(request):
        raise KeyError("content")

    assert _answered(b'{"do": "status"}', broken) == {
        "ok": False, "error": "it failed (KeyError); see the log",
    }  # fmt: skip


def test_without_a_head_there_is_nothing_to_roll_back(engine):
    sidecar = attach(engine)
    answer = order(sidecar, "rollback")
    assert not answer["ok"] and "no draft has been published" in answer["error"]
    assert engine.weights.latest_version() == 0
    sidecar.feeds.close()


def test_a_pause_stops_training_and_capture_and_outlives_the_trainer(engine):
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick() and sidecar._may_train()
    assert order(sidecar, "pause") == {"ok": True, "paused": True, "was_paused": False}
    assert not sidecar._may_train() and not sidecar._tick_in_cycle()
    assert engine.ring.wish is Collect.NOTHING
    sidecar._update_status(force=True)
    assert not sidecar.status.schedule["collecting"]
    sidecar.feeds.close()
    assert engine.ring.wish is Collect.NOTHING
    again = attach(engine)
    assert (
        again._tick() and not again._may_train() and engine.ring.wish is Collect.NOTHING
    )
    answer = order(again, "resume")
    assert answer == {"ok": True, "paused": False, "was_paused": True}
    assert engine.ring.collect
    kinds = [e["event"] for e in events(engine)]
    assert kinds.count("paused") == kinds.count("resumed") == 1
    again.feeds.close()


def test_once_ends_where_a_pause_allows_no_cycle(engine, capsys):
    engine.serve(60)
    first = attach(engine)
    order(first, "pause")
    first.feeds.close()
    assert main(["train", "--once", "--run-dir", str(engine.run_dir)]) == 1
    said = capsys.readouterr().err
    assert "training is paused" in said and "`vllm-tide resume`" in said
    assert engine.weights.latest_version() == 0


def test_a_pause_inside_a_cycle_keeps_what_the_cycle_would_train_on(engine):
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick() and sidecar._may_train()
    tick = sidecar._tick

    def pause_then_tick():
        order(sidecar, "pause")
        return tick()

    sidecar._tick = pause_then_tick
    sidecar._train()
    sidecar._tick = tick
    assert sidecar.status.last_decision == "interrupted" and not sidecar._may_train()
    order(sidecar, "resume")
    assert sidecar._may_train()  # at once: no other requests need to come
    sidecar.feeds.close()


def test_a_pause_that_cannot_be_kept_says_so(engine):
    sidecar = attach(engine)
    (engine.run_dir / "paused.json").mkdir()
    answer = order(sidecar, "pause")
    assert answer["paused"] and "cannot be changed" in answer["note"]
    sidecar.feeds.close()


def test_an_unknown_order_is_answered_with_those_there_are(engine):
    sidecar = attach(engine)
    assert order(sidecar, "dance")["error"] == (
        "'dance' is no order; give one of status, pause, resume, rollback"
    )
    sidecar.feeds.close()


def test_the_commands_reach_a_running_trainer(engine, capsys):
    sidecar = attach(engine)
    loop = threading.Thread(target=sidecar.run)
    loop.start()
    where = ["--run-dir", str(engine.run_dir)]
    try:
        assert main(["status", *where]) == 0
        assert main(["pause", *where]) == main(["pause", *where]) == 0
        assert main(["status", "--json", *where]) == 0
        assert main(["resume", *where]) == 0
        assert main(["rollback", *where]) == 1
    finally:
        sidecar.stop()
        loop.join(20)
    said = capsys.readouterr()
    name = f"trainer {os.getpid()}"
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{name}: ") and "version 0 served" in lines[0]
    assert lines[1:3] == [f"{name}: paused", f"{name}: was paused"]
    assert '"state"' in lines[3] and lines[4] == f"{name}: resumed"
    assert "no draft has been published" in said.err
    assert main(["status", *where]) == 2
    assert "no trainer is running" in capsys.readouterr().err
