"""The sidecar on real shared memory: train, publish, refusal, stop."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.train.toys import HIDDEN, VOCAB, ToyTarget
from tests.transport.samples import make_manifest, write_record
from tests.transport.test_kill import child_that_tells
from vllm_tide.draft import DraftError, load_draft, save_draft
from vllm_tide.sidecar import loop
from vllm_tide.sidecar.loop import Sidecar
from vllm_tide.train.assemble import VERIFY
from vllm_tide.transport.feeds import open_feeds
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import write_manifest
from vllm_tide.transport.ring import RingSpec, RingWriter
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.versions import first_version, number_of
from vllm_tide.transport.weights import WeightsSegment

TOY = ToyTarget()
KNOBS = {
    "batch_tokens": 256,
    "steps_per_cycle": 25,
    "learning_rate": 1e-2,
    "min_new_tokens": 1000,
    "holdout_share": 0.25,  # so that 60 requests are enough evidence
    "nice": 0,
}


class Engine:
    """The engine's side: segments, manifest, traffic."""

    def __init__(self, folder: Path, layers: tuple[int, ...] = (1, 2, 3)) -> None:
        (folder / "target").mkdir()
        (folder / "target" / "config.json").write_text(
            json.dumps({"vocab_size": VOCAB})
        )
        save_file(
            {"model.embed_tokens.weight": TOY.embed, "lm_head.weight": TOY.head},
            folder / "target" / "model.safetensors",
        )
        save_draft(TOY.draft(), folder / "draft", torch.float32)
        spec = RingSpec("test", HIDDEN, layers, VOCAB, "float32", "hidden", 1)
        self.ring = RingWriter.create(spec, 8 << 20)
        self.weights = WeightsSegment.create(4 << 20)
        self.run_dir = folder / "run"
        self.manifest = make_manifest(
            "test",
            ring=self.ring.name,
            weights=self.weights.name,
            target_path=str(folder / "target"),
            draft_path=str(folder / "draft"),
            target_dtype="float32",
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            aux_layer_ids=layers,
            teacher_topk=1,
            feature_dtype="float32",
            num_speculative_tokens=3,
            tide={"train": dict(KNOBS)},
            created_unix=time.time(),
        )
        self.announce()
        self._random = random.Random(0)

    def announce(self) -> None:
        write_manifest(self.run_dir, self.manifest)

    def restart(self) -> None:
        """Another engine of the same kind, with an empty weights segment."""
        self.weights = WeightsSegment.create(4 << 20)
        self.manifest = replace(self.manifest, weights=self.weights.name)
        self.announce()

    def serve(self, requests: int) -> None:
        """Write finished requests, each in a few verify records."""
        for _ in range(requests):
            key = self._random.getrandbits(64)
            doc = TOY.document(self._random.randrange(VOCAB), 30, 3, key)
            for lo in range(0, 30, 5):
                part = slice(lo, lo + 5)
                record = Record(
                    key, VERIFY, lo, 3, 4, -1, 0, doc.tokens[part].numpy(),
                    doc.features[part].numpy(), 0,
                    doc.teacher_hidden[part].numpy(), finished=lo == 25,
                )  # fmt: skip
                assert write_record(self.ring, record)

    @property
    def latest(self) -> int:
        """Number of the draft that was sent last."""
        return number_of(self.weights.latest_version())

    def report(self, installed: int, refused: int = 0, reason: str = "") -> None:
        """Report the numbers of the served and of the last refused draft."""
        versions = first_version(installed), first_version(refused)
        self.weights.report(*versions, reason, swap_pause_ms=2.0)

    def status(self) -> dict:
        return json.loads((self.run_dir / "trainer-test.json").read_text())

    def close(self) -> None:
        self.ring.close()
        self.weights.close()


def attach(engine: Engine) -> Sidecar:
    feeds = open_feeds(engine.run_dir)
    feeds.poll()
    return Sidecar(feeds, engine.run_dir)


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.close()


def serve_what_no_target_gives(engine):
    doc = TOY.document(3, 5, 3, 1)
    plain = Record(
        1, VERIFY, 0, 3, 4, -1, 0, doc.tokens.numpy(),
        doc.features.numpy(), 0, doc.teacher_hidden.numpy(), finished=True,
    )  # fmt: skip
    ids = np.full(5, VOCAB, np.int32)
    assert write_record(engine.ring, replace(plain, token_ids=ids))
    for number, value in enumerate((np.nan, np.inf), 2):
        rows = np.full_like(plain.features, value)
        assert write_record(engine.ring, replace(plain, key=number, features=rows))


def test_once_trains_and_publishes_and_the_next_run_continues(engine, tmp_path):
    serve_what_no_target_gives(engine)
    engine.serve(60)
    sidecar = attach(engine)
    assert sidecar.run(once=True) == "stopped"
    assert engine.latest == 1
    sent = engine.weights.read()
    assert sent.meta["gain"] > 0.5
    served = load_draft(tmp_path / "draft", TOY.rows)
    assert set(sent.tensors) == set(served.named_tensors())
    assert {t.dtype for t in sent.tensors.values()} == {"float32"}
    status = engine.status()
    assert status["state"] == "stopped"
    assert status["published_version"] == 1
    assert status["rows_read"] == 60 * 30 + 3 * 5
    assert status["rows_skipped"]["token_out_of_range"] == 5
    assert status["rows_skipped"]["not_finite"] == 10
    assert status["holdout_acceptance_new"] > status["holdout_acceptance_live"]
    assert oct((engine.run_dir / "trainer-test.json").stat().st_mode)[-3:] == "600"
    engine.report(1)
    again = attach(engine)
    live, published = again.trainer.snapshot(), sidecar.trainer.snapshot()
    assert all(torch.equal(live[name], published[name]) for name in live)
    assert all(bool(t.isfinite().all()) for t in live.values())
    again.feeds.close()


def test_a_draft_that_the_next_server_will_not_serve_is_reported(engine, caplog):
    caplog.set_level(logging.INFO, logger="vllm_tide.train")
    for undecided in (False, True):
        sidecar = attach(engine)
        if undecided:
            sidecar.deployment.canary.begin("test", 1)
        sidecar.stop()
        sidecar.run()
        assert ("event=not_stored" in caplog.text) == undecided


def test_a_servers_gpu_is_used_after_its_first_request(engine, monkeypatch):
    """Its KV cache exists then; memory is claimed before the models are loaded."""
    order: list[str] = []
    load = loop.load_draft
    monkeypatch.setattr(loop.gpu, "serves_on", lambda *_: True)
    monkeypatch.setattr(loop.gpu, "claim_memory", lambda *_: order.append("claim"))
    monkeypatch.setattr(
        loop, "load_draft", lambda *given: (order.append("load"), load(*given))[1]
    )

    def sleep(_seconds: float) -> None:
        assert not order
        engine.serve(1)

    admin = loop.AdminSocket
    monkeypatch.setattr(
        loop, "AdminSocket", lambda *given: (order.append("announce"), admin(*given))[1]
    )
    monkeypatch.setattr(loop.time, "sleep", sleep)
    sidecar = attach(engine)
    assert order == ["claim", "announce", "load"]
    sidecar.feeds.close()


def test_a_waiting_trainer_logs_how_much_more_it_needs(engine):
    sidecar = attach(engine)
    sidecar.status.state = "waiting"
    sidecar._update_status(force=True)
    needed = sidecar.config.min_new_tokens
    assert sidecar.status.waiting_for == f"{needed} more captured tokens"
    sidecar.feeds.close()


def test_the_ring_does_not_fill_during_a_cycle(engine):
    engine.manifest.tide["train"] = {**KNOBS, "steps_per_cycle": 4}
    engine.announce()
    engine.serve(60)
    sidecar = attach(engine)
    tick, worst = sidecar._tick, []

    def traffic() -> bool:
        engine.serve(4)
        going = tick()
        worst.append(engine.ring.stats().used_bytes)
        return going

    sidecar._tick = traffic
    sidecar.run(once=True)
    assert len(worst) > 4  # after every step
    assert max(worst) == 0
    assert engine.ring.stats().dropped_records == 0


def test_features_of_other_layers_are_refused(tmp_path):
    engine = Engine(tmp_path, layers=(1, 2, 4))
    try:
        message = r"captured layers \(1, 2, 4\) differ from the draft's \(1, 2, 3\)"
        with pytest.raises(DraftError, match=message):
            attach(engine)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("method", "form"), [("greedy", "argmax_mass"), ("probabilistic", "mass")]
)
def test_sampled_requests_are_scored_by_the_engines_draft_sampling(
    engine, method, form
):
    engine.manifest = replace(engine.manifest, draft_sample_method=method)
    engine.announce()
    sidecar = attach(engine)
    assert (sidecar.trainer.metric, sidecar.trainer.sampled_form) == ("served", form)
    sidecar.feeds.close()


def command(*argv):
    """Run a command in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_tide", *map(str, argv)],
        stderr=subprocess.PIPE,
        text=True,
    )


def until(check):
    deadline = time.monotonic() + 90
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state_of(run_dir):
    path = run_dir / "trainer-test.json"
    return json.loads(path.read_text())["state"] if path.exists() else ""


@pytest.mark.slow
def test_the_command_stops_on_sigterm_and_reports_a_missing_engine(engine, tmp_path):
    trainer = command("train", "--run-dir", engine.run_dir, "--engine", "test")
    until(lambda: state_of(engine.run_dir) == "waiting")
    trainer.terminate()
    _, errors = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, errors
    assert engine.status()["state"] == "stopped"
    nobody = command("train", "--run-dir", tmp_path / "none")
    _, errors = nobody.communicate(timeout=60)
    assert nobody.returncode == 1
    assert "no live engine" in errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "relay"])
def test_a_command_that_waits_for_an_engine_stops_gracefully(kind, tmp_path):
    """A container's first process ignores signals without a handler."""
    process = command(kind, "--run-dir", tmp_path, "--wait")
    # Until it waits, or has ended.
    lines = list(takewhile(lambda line: "waiting for" not in line, process.stderr))
    process.terminate()
    _, more = process.communicate()
    assert process.returncode == 0, (*lines, more)


def serve_until_killed(folder, tell):
    engine = Engine(folder)
    engine.serve(5)
    os.write(tell, f"{engine.ring.name} {engine.weights.name}".encode())
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_the_command_ends_or_waits_for_the_next_engine_after_a_kill(tmp_path, waits):
    engine, names = child_that_tells(serve_until_killed, tmp_path)
    run_dir = tmp_path / "run"
    trainer = command("train", "--run-dir", run_dir, *["--wait"] * waits)
    until(lambda: state_of(run_dir) == "waiting")
    engine.kill()
    until(lambda: state_of(run_dir) == "engine_gone")
    if waits:
        time.sleep(1.0)  # it has begun to wait
        assert trainer.poll() is None
        trainer.terminate()
    _, errors = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, errors
    # It reclaimed the segments of the killed engine.
    assert len(names.split()) == 2
    assert not [n for n in names.split() if os.path.exists(f"{SHM_DIR}/{n}")]
    assert not list(run_dir.glob("engine-*.json"))
