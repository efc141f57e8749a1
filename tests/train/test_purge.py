"""Purge from the command to the last byte of the buffers."""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.toys import HIDDEN
from tests.transport.samples import make_record, make_spec
from tests.transport.spool_toys import CONFIG
from vllm_tide.cli import purge as command
from vllm_tide.config import TrainConfig
from vllm_tide.train import purge
from vllm_tide.train.purge import PurgeInbox
from vllm_tide.train.reservoir import SampleBuffer
from vllm_tide.train.sample import Branch, Sample
from vllm_tide.transport.spool import EngineFolder
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.spool_writer import SpoolWriter
from vllm_tide.transport.tenant import tenant_id, tenant_key

MARKER = 0x5EC7E7
KNOBS = {
    "batch_tokens": 128,
    "max_sample_tokens": 64,
    "buffer_tokens": 4096,
    "holdout_tokens": 4096,
    "holdout_share": 0.5,
}


def marked(key: int, tenant: int, marker: int, size: int = 100) -> Sample:
    """A document whose every tensor carries the marker."""
    value = float(marker)
    return Sample(
        key=key,
        start=0,
        num_prompt_tokens=3,
        tokens=torch.full((size,), marker, dtype=torch.int32),
        features=torch.full((size, 3 * HIDDEN), value),
        has_teacher=torch.ones(size, dtype=torch.bool),
        teacher_hidden=torch.full((size, HIDDEN), value),
        branches=(
            Branch(
                50,
                torch.full((2,), marker, dtype=torch.int32),
                torch.full((2, 3 * HIDDEN), value),
                torch.full((2, HIDDEN), value),
                torch.full((2,), value),
                0,
            ),
        ),
        tenant=tenant,
    )


def storages_with(marker: int) -> int:
    """Tensors alive anywhere in this process whose memory holds the marker."""
    gc.collect()
    found = 0
    patterns = (np.float32(marker).tobytes(), np.int32(marker).tobytes())
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu":
            raw = torch.empty(0, dtype=torch.uint8).set_(thing.untyped_storage())
            data = raw.numpy().tobytes()
            found += any(pattern in data for pattern in patterns)
    return found


def test_nothing_of_a_purged_tenant_remains_in_memory():
    buffer = SampleBuffer(TrainConfig(**KNOBS))
    for key in range(20):
        buffer.add(marked(key, 1 + key % 2, MARKER if key % 2 else 11))
    # Overlaps, tail cuts and repeated passes must leave no copy behind.
    buffer.add(marked(1, 2, MARKER, 70))
    buffer.shuffled()
    assert storages_with(MARKER) > 0
    assert {s.tenant for s in buffer.train} == {1, 2}
    assert {s.tenant for s in buffer.holdout} == {1, 2}
    removed = buffer.purge(tenant=2)
    assert removed.samples > 10
    assert storages_with(MARKER) == 0
    assert {s.tenant for s in buffer.train} == {1}
    assert {s.tenant for s in buffer.holdout} == {1}


def test_a_request_is_answered_once_by_every_trainer(tmp_path):
    first, second = PurgeInbox(tmp_path), PurgeInbox(tmp_path)
    assert first.pending() == []
    old = purge.ask(tmp_path, 7)
    new = purge.ask(tmp_path, None)
    assert first.pending() == second.pending() == [old, new]
    first.done(old, {"tokens": 3})
    assert first.pending() == [new]
    assert second.pending() == [old, new]
    assert purge.answers(tmp_path, old) == {os.getpid(): {"tokens": 3}}
    assert purge.answers(tmp_path, new) == {}
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    purge.withdraw(tmp_path, old)
    assert second.pending() == [new]
    purge.withdraw(tmp_path, new)
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_request_is_removed_in_the_end(tmp_path, monkeypatch):
    purge.ask(tmp_path, 7)
    later = time.time() + purge.MAX_AGE_S + 1
    monkeypatch.setattr(purge.time, "time", lambda: later)
    assert PurgeInbox(tmp_path).pending() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"tenant": 5, "asked_unix_s": 1}', '{"tenant": null}',
     '{"tenant": "x", "asked_unix_s": 1}', '{"tenant": null, "asked_unix_s": NaN}'],
)  # fmt: skip
def test_what_is_no_request_is_said_once(tmp_path, text, caplog):
    (tmp_path / "purge-0.json").write_text(text)
    inbox = PurgeInbox(tmp_path)
    for _ in range(3):
        assert inbox.pending() == []
    assert caplog.text.count("is no purge request") == 1


def test_a_run_dir_that_is_gone_has_no_requests(tmp_path):
    inbox = PurgeInbox(tmp_path / "gone")
    assert inbox.pending() == []
    inbox.done(purge.PurgeRequest("x", None, 0.0), {})


def status(run_dir, name="e", state="waiting", age_s=0.0, pid=None):
    fields = {
        "pid": os.getpid() if pid is None else pid,
        "state": state,
        "updated_unix": time.time() - age_s,
    }
    (run_dir / f"trainer-{name}.json").write_text(json.dumps(fields))


def test_live_trainers_are_those_that_say_so(tmp_path):
    status(tmp_path, "a", pid=1)
    status(tmp_path, "b", pid=2, state="stopped")
    status(tmp_path, "c", pid=3, age_s=purge.FRESH_S + 1)
    (tmp_path / "trainer-d.json").write_text("{")
    assert purge.live_trainers(tmp_path) == {1}


def call(run_dir, *more):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["purge", "--run-dir", str(run_dir), *more])
    return command.run(args)


def answering(run_dir, seen):
    """A trainer's loop: answers one request."""
    inbox = PurgeInbox(run_dir)
    while not seen:
        for request in inbox.pending():
            seen.append(request.tenant)
            inbox.done(request, {"samples": 2, "tokens": 40})
        time.sleep(0.01)


def test_the_command_waits_for_the_trainers_and_cleans_up(tmp_path, capsys):
    key, seen = tenant_key(tmp_path), []
    status(tmp_path)
    trainer = threading.Thread(target=answering, args=(tmp_path, seen))
    trainer.start()
    assert call(tmp_path, "--tenant", "acme") == 0
    trainer.join()
    assert seen == [tenant_id("acme", key)]
    out = capsys.readouterr().out
    assert f"purge of tenant {seen[0]:016x}" in out
    assert f"trainer {os.getpid()}: removed 2 samples, 40 tokens" in out
    assert "acme" not in out
    assert not list(tmp_path.glob("purge*"))


def test_the_command_takes_an_id_and_everything(tmp_path):
    status(tmp_path)
    for more, wanted in ((["--tenant-id", "00ff"], 255), ([], None)):
        seen: list[int | None] = []
        trainer = threading.Thread(target=answering, args=(tmp_path, seen))
        trainer.start()
        assert call(tmp_path, *more) == 0
        trainer.join()
        assert seen == [wanted]


def test_the_command_removes_shards_of_a_spool(tmp_path, capsys):
    store = open_store(str(tmp_path / "spool"))
    writer = SpoolWriter(EngineFolder(store, "e1"), make_spec(), CONFIG)
    for tenant in (1, 2, 255):
        writer.add(replace(make_record(make_spec(), tenant), tenant=tenant))
        writer.flush()
    run_dir, spool = tmp_path / "run", str(tmp_path / "spool")
    call(run_dir, "--tenant-id", "ff", "--spool", spool)
    assert "spool: removed 1 shards" in capsys.readouterr().out
    call(run_dir, "--spool", spool)
    assert "spool: removed 2 shards" in capsys.readouterr().out


def test_without_a_trainer_the_request_waits_for_one(tmp_path, capsys):
    assert call(tmp_path) == command.EXIT_UNANSWERED
    assert "no trainer is running" in capsys.readouterr().err
    assert len(PurgeInbox(tmp_path).pending()) == 1


def test_a_trainer_that_does_not_answer_is_named(tmp_path, capsys):
    status(tmp_path, pid=4242)
    assert call(tmp_path, "--timeout", "0.1") == command.EXIT_UNANSWERED
    assert "trainer 4242 has not answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--tenant", "acme"), "no engine has named tenants"),
        (("--tenant-id", "xyz"), "--tenant-id: 'xyz'"),
        (("--tenant-id", "1" * 17), "no id of 64 bits"),
        (("--tenant-id=-1",), "no id of 64 bits"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, capsys, more, sentence):
    assert call(tmp_path, *more) == command.EXIT_ERROR
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
