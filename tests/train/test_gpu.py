"""The trainer on a GPU: its share of time, its refusals, and a CPU's steps."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch

from tests.sidecar.test_sidecar import KNOBS, Engine
from tests.train.toys import TOY, ToyTarget, toy_trainer
from vllm_tide.cli import train as cli
from vllm_tide.cli.main import main
from vllm_tide.config import GIB, TrainConfig
from vllm_tide.draft import DFlashConfig, DraftError
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.eagle3_config import Eagle3Config
from vllm_tide.draft.target import TargetRows
from vllm_tide.sidecar import loop as sidecar
from vllm_tide.train import gpu
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.gpu import (
    CONTEXT_BYTES,
    GpuTimeBudget,
    MemoryBackoff,
    claim_memory,
    give_back_memory,
    gpu_uuid,
    memory_need,
    release_cache,
    use_device,
    with_gpu_share,
)
from vllm_tide.train.packing import pack
from vllm_tide.train.step import TrainStep
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport import process


def test_busy_time_reserves_its_share_of_wall_time():
    budget = GpuTimeBudget(0.25)
    budget.add_busy(100.0, 1.0)
    assert budget.wait_s(101.0) == 3.0
    budget.add_busy(110.0, 1.0)  # the time before is not saved up
    assert budget.wait_s(111.0) == 3.0
    budget.add_busy(112.0, 1.0)  # begun too early: a debt
    assert budget.wait_s(113.0) == 5.0


@pytest.fixture
def device_memory(monkeypatch):
    """A GPU of 80 GiB; returns the memory that is free, and the calls."""
    calls = Mock(free=14 * GIB)
    monkeypatch.setattr(gpu, "_claim", [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (calls.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * GIB)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", calls.set_fraction
    )
    monkeypatch.setattr(torch, "empty", calls.empty)
    return calls


def test_memory_on_a_server_s_gpu_is_taken_at_the_start_and_bounded(device_memory):
    device = torch.device("cuda:1")
    claim_memory(device, 10 * GIB)
    (size,), _ = device_memory.empty.call_args
    assert size == int(12.5 * GIB) - CONTEXT_BYTES - 2 * GIB
    device_memory.set_fraction.assert_called_once_with(1.25 * 10 / 80, device)


def test_the_claim_is_taken_again_after_out_of_memory(device_memory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", device_memory.empty_cache)
    release_cache()
    device_memory.empty.assert_not_called()  # nothing was claimed
    claim_memory(torch.device("cuda:1"), 10 * GIB)
    release_cache()
    assert device_memory.empty.call_count == 2
    give_back_memory()
    assert device_memory.empty.call_count == 2


def test_a_server_s_gpu_without_free_memory_is_refused_with_the_size(device_memory):
    device_memory.free = 4 * GIB
    with pytest.raises(DraftError, match=r"training needs 12\.5 GiB on 'cuda:1', the"):
        claim_memory(torch.device("cuda:1"), 10 * GIB)
    device_memory.empty.assert_not_called()


def test_the_estimate_covers_the_states_of_an_8b_s_draft():
    shape = Eagle3Config(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        draft_vocab_size=32000,
        aux_layer_ids=(2, 16, 29),
        target_hidden_size=4096,
    )
    assert 12 * GIB < memory_need(shape, TrainConfig(), 3) < 16 * GIB


def test_the_estimate_grows_with_the_block_of_dflash():
    shape = DFlashConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        draft_vocab_size=151936,
        aux_layer_ids=(2, 10, 18, 26, 34),
        target_hidden_size=4096,
        num_layers=5,
        block_size=16,
    )
    needs = [memory_need(shape, TrainConfig(), depth) for depth in (3, 15)]
    assert needs[1] > 1.2 * needs[0]


def test_a_gpu_shared_with_a_server_is_left_to_it_by_default(monkeypatch, caplog):
    uuids = {0: "GPU-1", 1: "GPU-2"}
    here = Mock(side_effect=lambda device: Mock(uuid=uuids[device.index or 0]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", here)
    caplog.set_level("INFO")
    server = gpu_uuid(torch.device("cuda:0"))
    assert (server, gpu_uuid(torch.device("cpu")), gpu_uuid(None)) == ("GPU-1", "", "")
    # Every rank waits for the slowest one, so all their GPUs count.
    servers = [server, "GPU-3"]
    for device, share, expected in (
        ("cuda:1", None, 1.0),
        ("cpu", None, 1.0),
        ("cuda:0", 0.5, 0.5),
        ("cuda:0", 1.0, 1.0),
    ):
        config = TrainConfig(device=device, gpu_share=share)
        assert with_gpu_share(config, servers).gpu_share == expected
        assert with_gpu_share(config, ()).gpu_share == (share or 1.0)
    assert not caplog.records
    for device in ("cuda", "cuda:0"):
        assert with_gpu_share(TrainConfig(device=device), servers).gpu_share == 0.1
    assert "limited to 0.1 of the time; change it with tide.train.gpu_share" in (
        caplog.records[-1].getMessage()
    )
    assert with_gpu_share(TrainConfig(), ()).gpu_share == 1.0  # two CPUs are no GPU


def test_progress_is_called_during_a_pause(monkeypatch):
    answers, waits = iter([True, True, True, False]), iter([1.0, 1.0, 0.0])
    monkeypatch.setattr(gpu.time, "sleep", lambda seconds: None)
    fake = Mock(wait_s=lambda now: next(waits))
    callback = gpu.ProgressCallback(lambda: next(answers), fake)
    assert callback()
    assert not callback()
    assert [c[0] for c in fake.mock_calls] == ["begin", "end", "begin", "end", "begin"]


def test_pauses_grow_until_a_cycle_has_memory(caplog):
    backoff = MemoryBackoff(TrainConfig(batch_tokens=512))
    assert not backoff.is_paused(0.0)
    for starved, pause in ((True, 30), (True, 60), (False, 0), (True, 30)):
        backoff.cycle_done(starved, 100.0)
        if pause:
            assert backoff.is_paused(99.0 + pause)
            assert not backoff.is_paused(100.0 + pause)
            assert f"retry in {pause} s" in caplog.records[-1].message
    assert "reduce tide.train.batch_tokens (512)" in caplog.text
    for _ in range(9):
        backoff.cycle_done(True, 0.0)
    assert "retry in 600 s" in caplog.records[-1].message


def starved(kind: str) -> RuntimeError:
    """Return an out-of-memory error of torch: allocator, CUDA call, BLAS handle."""
    if kind == "allocator":
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.")
    if kind == "call":
        return torch.AcceleratorError("CUDA error: out of memory", 2)
    return RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`")


@pytest.mark.parametrize(
    ("where", "kind"),
    [("step", "call"), ("step", "handle"), ("fresh", "allocator"),
     ("holdout", "allocator")],
)  # fmt: skip
def test_a_cycle_without_memory_ends_and_the_next_continues(monkeypatch, where, kind):
    trainer = toy_trainer()
    if where == "fresh":  # only requests after a first cycle are scored there
        trainer.train_cycle()
        trainer.add_samples(TOY.document(3, 20, 3, key) for key in range(90, 99))
    new, fresh = trainer.buffer.new_tokens, len(trainer.buffer.fresh)
    at, owner, name = {
        "step": (2, TrainStep, "clip_gradients"),
        "fresh": (1, Trainer, "evaluate"),
        "holdout": (1, Trainer, "evaluate"),
    }[where]
    whole, calls = getattr(owner, name), []

    def fails_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise starved(kind)
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails_once)
    result = trainer.train_cycle()
    assert (result.reason, result.publish, trainer.out_of_memory) == (
        "out of memory", False, 1,
    )  # fmt: skip
    assert trainer.buffer.new_tokens == new  # the next need not wait for more
    assert len(trainer.buffer.fresh) <= fresh
    assert all(p.grad is None for p in trainer.draft.parameters())
    again = trainer.train_cycle()
    assert again.steps == 3 and again.new is not None
    assert trainer.out_of_memory == 1 and trainer.buffer.new_tokens == 0


def test_a_group_of_ranks_and_another_error_end_the_cycle():
    trainer = toy_trainer()
    for error in (starved("allocator"), RuntimeError("size mismatch")):
        run = Mock(side_effect=error)
        trainer.stepper = Mock(run=run, step=trainer.stepper.step)
        with pytest.raises(type(error)):
            trainer.train_cycle()
    assert trainer.out_of_memory == 0


def test_a_missing_gpu_gives_one_line():
    use_device("cpu")
    with pytest.raises(DraftError, match=r"tide\.train\.device: 'cuda:99', but .* use"):
        use_device("cuda:99")


def full_gpu(monkeypatch, error: RuntimeError, at: str = "set_device") -> None:
    """A GPU that fails on the first call that makes a context."""
    calls = {"is_available": True, "device_count": 1, "set_device": None}
    calls |= {"Stream": object(), "set_stream": None}
    for name, value in calls.items():
        fake = Mock(return_value=value, side_effect=error if name == at else None)
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "1")  # restored afterwards


@pytest.mark.parametrize(
    ("kind", "at"), [("allocator", "Stream"), ("call", "set_device")]
)
def test_a_gpu_without_memory_for_a_context_gives_one_line(monkeypatch, kind, at):
    full_gpu(monkeypatch, starved(kind), at)
    with pytest.raises(DraftError, match=r"'cuda:0' is out of memory for the tr"):
        use_device("cuda:0")
    full_gpu(monkeypatch, RuntimeError("CUDA error: unspecified launch failure"), at)
    with pytest.raises(RuntimeError, match="launch failure"):
        use_device("cuda:0")


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine for a trainer on a GPU; this process is not changed."""
    monkeypatch.setattr(process, "prepare_sidecar_process", lambda: None)
    made = Engine(tmp_path)
    made.manifest.tide["train"] = {**KNOBS, "device": "cuda:0"}
    made.announce()
    yield made
    made.close()


@pytest.mark.parametrize("more", [(), ("--wait",)])
def test_a_trainer_without_memory_ends_with_the_message(
    monkeypatch, capsys, engine, more
):
    full_gpu(monkeypatch, starved("call"), "")
    monkeypatch.setattr(sidecar, "_pin", lambda config: None)
    monkeypatch.setattr(cli, "POLL_S", 0.0)
    load = Mock(side_effect=starved("allocator"))
    monkeypatch.setattr(sidecar.TargetRows, "load", load)
    assert main(["train", "--run-dir", str(engine.run_dir), *more]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    what = "the draft and the target's"
    assert message.startswith(
        f"error: tide.train.device: 'cuda:0' is out of memory for {what}"
    )


def test_a_waiting_trainer_releases_the_last_draft_first(monkeypatch, engine):
    free, cleared = [], []

    class Attached:
        """Has a reference cycle, as a sidecar does."""

        stopping = paused = False
        status = stop = None

        def __init__(self, feeds, *args):
            assert all(one() is None for one in free)
            self.feeds, self.me = feeds, self
            self.state = "stopped" if free else "engine_gone"
            free.append(weakref.ref(self))

        def run(self, once):
            self.feeds.close()
            return self.state

    monkeypatch.setattr(sidecar, "Sidecar", Attached)
    monkeypatch.setattr(sidecar, "describe", lambda attached: "")
    monkeypatch.setattr(sidecar, "prepare_process", lambda *args, **kwargs: None)
    monkeypatch.setattr(gpu, "release_cache", lambda: cleared.append(len(free)))
    gc.disable()  # or it may come by itself
    try:
        assert main(["train", "--run-dir", str(engine.run_dir), "--wait"]) == 0
    finally:
        gc.enable()
    assert len(free) == 2 and cleared == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["packed", "flex"])
@pytest.mark.parametrize(
    "loss", [{"forward_kl": 1.0}, {"lk_hybrid": 1.0, "next_token": 0.5}]
)
def test_steps_equal_those_of_a_cpu(attention, loss):
    toy, results = ToyTarget(), {}
    documents = [toy.document(i, 40, 3, i) for i in range(6)]
    for place, attends in (("cpu", "packed"), ("cuda", attention)):
        rows = TargetRows(embed := toy.embed.to(place), head := toy.head.to(place))
        draft = Eagle3Draft.initialise(toy.draft(head_dim=16).config, embed, head)
        config = TrainConfig(attention=attends, loss=loss)
        step = TrainStep(draft, rows, config)
        losses = [step.run(pack(documents)).loss for _ in range(5)]
        seen = evaluate(draft, rows, documents, 3, attention=attends)
        results[place] = [*losses, seen.acceptance("mass")]
    assert results["cuda"] == pytest.approx(results["cpu"], rel=2e-2)
