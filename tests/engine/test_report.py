"""The worker's report to vLLM: its encoder accepts only Python's own types."""

import enum
import math
import threading
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from vllm_tide.capture.guard import Guard
from vllm_tide.config import parse_tide
from vllm_tide.engine.server_log import ServerLog
from vllm_tide.engine.worker import with_valid_topk
from vllm_tide.engine.worker_v1 import WorkerTideV1
from vllm_tide.transport.rendezvous import to_builtins

ODD = {
    "float": np.float64(0.5),
    "int": np.int64(7),
    "flag": np.bool_(True),
    "array": np.arange(3),
    "tensor": torch.tensor(2.5),
    "counter": Counter({np.int32(3): np.uint64(4)}),
    "huge": 10**400,
    "kind": enum.IntEnum("Kind", "A B").B,
    "tuple": (np.float32(1.5), None, "x", True, math.inf),
    "other": object,
}


def test_every_number_becomes_one_that_vllm_can_send():
    with pytest.raises((TypeError, OverflowError)):
        msgspec.msgpack.encode(ODD)
    plain = to_builtins(ODD)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), strict=False)
    assert decoded["float"] == 0.5 and decoded["int"] == 7 and decoded["flag"] is True
    assert decoded["array"] == [0, 1, 2] and decoded["tensor"] == 2.5
    assert plain["counter"] == {3: 4} and decoded["huge"] == 2**64 - 1
    assert decoded["kind"] == 2 and decoded["tuple"] == [1.5, None, "x", True, math.inf]


def reporting(stats):
    """The worker's part of TIDE with control alone."""
    tide = object.__new__(WorkerTideV1)
    tide.capture = tide.swapper = tide._ring = tide._segment = tide._manifest = None
    tide._guard, tide._reports = Guard("capture"), Guard("reporting")
    tide._losses, tide._server_log = Counter(), ServerLog()
    tide._reported = tide._sent_staged = 0
    tide._draft_since, tide._group = 0.0, None
    tide.control = SimpleNamespace(stats=stats, faults=Counter(), end=lambda: None)
    tide._leader = True
    runner = SimpleNamespace(use_async_scheduling=True)
    tide._worker = SimpleNamespace(model_runner=runner)
    return tide


def test_a_policy_that_reports_numpy_or_nothing_does_not_block():
    output = SimpleNamespace(tide=None)
    tide = reporting(lambda: {"draft_depth": np.float64(1.25)})
    tide.on_sampled(output, None, None, None)
    assert type(output.tide["draft_depth"]) is float
    msgspec.msgpack.encode(output.tide)

    def fails():
        raise ZeroDivisionError

    tide = reporting(fails)
    tide.on_sampled(output, None, None, None)
    assert tide._reports.faults == {"stats": 1} and output.tide["staged"] == 0


def test_a_report_does_not_access_the_run_directory():
    """Its file system may stall, and the report runs in the model's thread."""
    threads = []
    tide = reporting(dict)

    def exists():
        threads.append(threading.current_thread())
        return True

    tide._manifest = SimpleNamespace(exists=exists)
    assert tide._report() is not None
    assert threads == []


def test_an_engine_that_ends_meanwhile_is_not_announced_again(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_tide.engine.worker.RETRY_SECONDS", 0.0)
    tide = reporting(dict)
    tide._run_dir, tide._engine_id = tmp_path, "e1"
    tide._trainer, tide._not_announced = None, ""
    tide._stop = threading.Event()
    manifest = tmp_path / "engine-e1.json"

    def announce():
        tide.close()  # while the file system made it wait
        manifest.write_text("{}")

    monkeypatch.setattr(tide, "_announce", announce)
    tide._keep_announced()
    assert not manifest.exists()


@pytest.mark.parametrize(("asked", "entries"), [(64, 64), (100, 100), (1024, 100)])
def test_a_topk_teacher_has_no_more_entries_than_the_target_has_tokens(asked, entries):
    config = parse_tide({"capture": {"teacher": "topk", "teacher_topk": asked}})
    valid = with_valid_topk(config, 100)
    assert valid.capture.teacher_topk == entries
    assert valid.capture.teacher == "topk" and valid.train == config.train
