"""The staging thread works on its rank's device, and not before the first step."""

from types import SimpleNamespace

from vllm_tide.capture.guard import Guard
from vllm_tide.engine import staged_draft as stage
from vllm_tide.engine.worker_v2 import WorkerTideV2


def test_the_thread_selects_the_device_of_its_buffer_before_it_polls(monkeypatch):
    done = []
    monkeypatch.setattr(stage.torch.cuda, "set_device", done.append)
    upload_buffer = SimpleNamespace(device="cuda:3")
    stager = stage.Stager(SimpleNamespace(), SimpleNamespace(), buffer=upload_buffer)
    monkeypatch.setattr(stage, "POLL_SECONDS", 0)

    def poll():
        done.append("look")
        stager._stop.set()

    monkeypatch.setattr(stager, "check_now", poll)
    stager.start()
    stager._thread.join(timeout=30)
    assert done == ["cuda:3", "look"]


def test_no_draft_is_copied_to_a_device_before_the_first_step(monkeypatch):
    """A query from another thread ends a graph's capture, and with it the server."""
    uploads = []
    upload_buffer = SimpleNamespace(device="cuda:0", upload=uploads.append)
    weights = SimpleNamespace(version=1, meta={}, tensors={})
    segment = SimpleNamespace(latest_version=lambda: 1, read=lambda: weights)
    contract = SimpleNamespace(check=lambda _: None)
    stager = stage.Stager(segment, contract, buffer=upload_buffer)
    stager.check_now()
    assert not uploads and stager.staged_version == 0
    stager.serving = True
    stager.check_now()
    assert uploads == [{}] and stager.staged_version == 1


def test_the_steps_that_end_warm_up_requests_do_not_count_as_the_first():
    """vLLM runs them, without tokens, before it captures its graphs."""
    worker, calls = WorkerTideV2.__new__(WorkerTideV2), []
    worker.__dict__ |= {
        "swapper": None, "capture": None, "_guard": Guard("test"),
        "_reports": Guard("test"),
        "_at_first_step": [lambda: calls.append("first step")],
    }  # fmt: skip
    worker._between_steps(SimpleNamespace(num_scheduled_tokens={}, tide=None))
    assert not calls
    for _ in range(2):
        worker._between_steps(SimpleNamespace(num_scheduled_tokens={"a": 1}, tide=None))
    assert calls == ["first step"]
