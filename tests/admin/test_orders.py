"""Status, pause, resume and rollback on a trainer with a real ring."""

import json
import math
import os
import threading

import pytest

from tests.deploy.test_deployment import (
    assert_live,
    assert_sent,
    events,
    offer,
    published_once,
    serve,
)
from tests.sidecar.test_sidecar import Engine, attach
from vllm_tide.cli.main import main
from vllm_tide.cli.trainer import status_text
from vllm_tide.train.gpu import INTERRUPTED
from vllm_tide.transport.feeds import open_feeds
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import TransportError


@pytest.fixture
def engine(tmp_path, monkeypatch):
    # However slow the machine, every tick checks the canary.
    monkeypatch.setattr("vllm_tide.deploy.deployment.CANARY_TIME_SHARE", math.inf)
    made = Engine(tmp_path)
    yield made
    made.close()


def order(sidecar, what):
    return sidecar.execute({"do": what})


def test_a_draft_in_a_canary_is_rolled_back_to_the_previous_one(engine):
    sidecar, first = published_once(engine)
    assert order(sidecar, "rollback") == {
        "ok": True, "version": 1, "to": 0, "served_as": 2, "stored": 0,
    }  # fmt: skip
    assert_sent(engine, first)
    engine.report(2)
    assert sidecar._tick()
    canary = sidecar.deployment.canary
    assert not canary.undecided
    assert (canary.rollbacks, canary.all_rollbacks) == (0, 1)  # alerts count its own
    assert "after a rollback" in sidecar.deployment.waiting_for
    (event,) = events(engine, "rollback")
    assert (event["version"], event["to"], event["reason"]) == (1, 0, "ordered")
    sidecar.feeds.close()


def test_status_names_the_restored_draft(engine):
    sidecar, _ = published_once(engine)
    assert sidecar.deployment.origin == ""
    serve(engine, 160, 1, 4)
    assert sidecar._tick()  # version 1 is accepted
    sidecar.deployment._published_at = -math.inf
    offer(sidecar)
    engine.report(2)
    assert sidecar._tick()
    assert order(sidecar, "rollback")["to"] == 1
    sidecar._update_status(force=True)
    text = status_text(engine.status())
    assert "version 3 (first version 1) is installed with the next step" in text
    engine.report(3)
    assert sidecar._tick()
    sidecar._update_status(force=True)
    assert "version 3 served (first version 1)" in status_text(engine.status())
    sidecar.feeds.close()


def test_accepted_drafts_are_rolled_back_in_order_at_any_versions(
    engine,
):
    sidecar, first = published_once(engine)
    store = sidecar.deployment._store
    older = {name: 0.5 * t for name, t in sidecar.trainer.live_tensors().items()}
    store.put(older, 1)  # of another server: its versions begin at 1
    serve(engine, 160, 1, 4)
    assert sidecar._tick()  # version 1 is accepted and stored
    assert len(list(store.drafts())) == 2
    assert order(sidecar, "rollback")["to"] == 0
    assert_sent(engine, first)
    assert len(list(store.drafts())) == 1  # a rolled back draft does not return
    assert sidecar.deployment.origin == "the initial draft"
    assert order(sidecar, "rollback")["to"] == 1
    assert_sent(engine, older)
    assert sidecar.deployment.origin == "stored as version 1"
    assert order(sidecar, "rollback")["to"] == 0  # the initial draft
    assert_sent(engine, first)
    assert sidecar.deployment.origin == "the initial draft"
    with pytest.raises(TransportError, match="nothing was rolled back"):
        order(sidecar, "rollback")
    sidecar.feeds.close()


def test_the_command_rolls_back_without_a_trainer(engine, capsys):
    """To the previous stored draft, then to the one that the server started with."""
    sidecar, first = published_once(engine)
    older = {name: 0.5 * t for name, t in sidecar.trainer.live_tensors().items()}
    store = sidecar.deployment._store
    store.put(older, 1)
    serve(engine, 160, 1, 4)
    assert sidecar._tick()  # version 1 is accepted and stored
    where = ["--run-dir", str(engine.run_dir)]
    loop = threading.Thread(target=sidecar.run)
    sidecar.stop()
    loop.start()
    loop.join(20)

    assert main(["rollback", *where]) == 0
    stdout = capsys.readouterr().out
    assert "rolled back from version 1 to the draft stored as version 1, " in stdout
    assert "served as version 2" in stdout
    assert "no trainer" in stdout
    assert_sent(engine, older)
    assert len(list(store.drafts())) == 1  # a rolled back draft does not return
    assert main(["rollback", *where]) == 0
    assert_sent(engine, first)
    assert list(store.drafts()) == []
    assert main(["rollback", *where]) == 1
    assert "nothing was rolled back" in capsys.readouterr().err
    assert engine.latest == 3
    engine.report(3)
    again = attach(engine)  # and continues from it
    assert again._tick() and again.deployment.good == 3
    assert_live(again, first)
    assert main(["rollback", *where, "--timeout", "0.05"]) == 1  # it is the trainer's
    again.feeds.close()


def test_a_failed_rollback_without_a_trainer_gives_the_reason(engine, capsys):
    where = ["--run-dir", str(engine.run_dir)]
    assert main(["rollback", *where]) == 1
    assert "no draft has been published" in capsys.readouterr().err
    feeds = open_feeds(engine.run_dir)  # a trainer without a socket
    feeds.poll()
    assert main(["rollback", *where]) == 1
    assert "does not answer, so nothing was rolled back" in capsys.readouterr().err
    feeds.close()
    engine.manifest.tide["spool"] = {"url": "/spool"}
    engine.announce()
    assert main(["rollback", *where]) == 1
    assert "trained through a spool" in capsys.readouterr().err


def test_a_pause_stops_training_and_capture_and_outlives_the_trainer(engine):
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar._tick() and sidecar._may_train()
    assert order(sidecar, "pause") == {"ok": True, "paused": True, "was_paused": False}
    assert not sidecar._may_train() and not sidecar._tick_in_cycle()
    assert engine.ring.collect_mode is Collect.NOTHING
    sidecar._update_status(force=True)
    assert not sidecar.status.schedule["collecting"]
    sidecar.feeds.close()
    assert engine.ring.collect_mode is Collect.NOTHING
    again = attach(engine)
    assert (
        again._tick()
        and not again._may_train()
        and engine.ring.collect_mode is Collect.NOTHING
    )
    answer = order(again, "resume")
    assert answer == {"ok": True, "paused": False, "was_paused": True}
    assert engine.ring.collect
    assert len(events(engine, "paused")) == len(events(engine, "resumed")) == 1
    again.feeds.close()


def test_once_ends_where_a_pause_allows_no_cycle(engine, capsys):
    engine.serve(60)
    first = attach(engine)
    order(first, "pause")
    first.feeds.close()
    assert main(["train", "--once", "--run-dir", str(engine.run_dir)]) == 1
    stderr = capsys.readouterr().err
    assert "training is paused" in stderr and "`vllm-tide resume`" in stderr
    assert engine.latest == 0


def test_a_pause_inside_a_cycle_keeps_its_training_data(engine):
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
    assert sidecar.status.last_decision == INTERRUPTED and not sidecar._may_train()
    order(sidecar, "resume")
    assert sidecar._may_train()  # at once: no other requests need to come
    sidecar.feeds.close()


def test_status_is_of_now_and_not_of_the_last_report(engine):
    sidecar = attach(engine)
    sidecar._tick()  # writes a report; the next is due in a second
    sidecar.deployment.installed = 7
    assert order(sidecar, "status")["status"]["installed_version"] == 7
    sidecar.feeds.close()


def test_an_invalid_or_failed_order_gives_the_reason(engine):
    sidecar = attach(engine)
    assert order(sidecar, "dance")["error"] == (
        "unknown command 'dance'; use one of status, pause, resume, rollback, purge"
    )
    (engine.run_dir / "paused.json").mkdir()
    answer = order(sidecar, "pause")
    assert answer["paused"] and "cannot be changed" in answer["note"]
    sidecar.feeds.close()


def test_during_a_cycle_a_paused_trainer_is_not_called_training(engine):
    sidecar = attach(engine)
    sidecar.status.state = "training"
    assert order(sidecar, "pause")["paused"]
    assert order(sidecar, "status")["status"]["state"] == "paused"
    order(sidecar, "resume")
    assert order(sidecar, "status")["status"]["state"] == "waiting"
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
    captured = capsys.readouterr()
    name = f"trainer {os.getpid()}"
    lines = captured.out.splitlines()
    assert lines[0].startswith(f"{name}: ") and "version 0 served" in lines[0]
    assert "; cycles: 0, steps: 0; " in lines[0]
    assert lines[1:3] == [f"{name}: paused", f"{name}: was paused"]
    assert json.loads("\n".join(lines[3:-1]))[name]["state"]
    assert lines[-1] == f"{name}: resumed"
    assert "no draft has been published" in captured.err
    assert main(["status", *where]) == 1
    assert "no trainer answers" in capsys.readouterr().err
    log = "started\nMemoryError: 3 GB\n"
    (engine.run_dir / "trainer-x.log").write_text(log, encoding="utf-8")
    assert main(["status", *where]) == 1
    errors = capsys.readouterr().err
    assert "trainer-*.log; its last line: MemoryError: 3 GB\n" in errors
