"""Each kernel at a real size: equality with its reference, and bandwidth vs. a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from place import Place
from torch import Tensor

from vllm_tide.kernels.kl_loss import kl_rows, kl_rows_reference
from vllm_tide.kernels.launch import runs_triton
from vllm_tide.kernels.pack_rows import pack_rows, pack_rows_reference
from vllm_tide.kernels.topk_teacher import topk_teacher, topk_teacher_reference

REPEATS = 30


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        ours: Runs the kernel; returns the tensors to compare.
        reference: The same in PyTorch.
        num_bytes: Minimum bytes to read and write.
        exact: Whether the tensors must be equal bit by bit.
    """

    ours: Callable[[], list[Tensor]]
    reference: Callable[[], list[Tensor]]
    num_bytes: int
    exact: bool


def kernels(place: Place) -> None:
    """Measure the copy bandwidth, then every kernel relative to it."""
    size = (1 << 16) if place.dry else (1 << 30)
    copied = place.part("copy", lambda: _copy(place, size))
    for name, make in CASES.items():
        place.part(name, lambda make=make: _measure(place, make, copied))


def _copy(place: Place, size: int) -> dict[str, float]:
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = _time(place, lambda: [target.copy_(source)])
    return {"bytes": 2 * size, "gb_per_s": 2 * size / seconds / 1e9}


def _measure(place: Place, make: Any, copied: dict[str, float]) -> dict[str, Any]:
    case: Case = make()
    results, references = case.ours(), case.reference()
    worst = 0.0
    for ours, reference in zip(results, references, strict=True):
        a, b = ours.detach().cpu().double(), reference.detach().cpu().double()
        assert a.shape == b.shape, "the shape differs from the reference"
        if a.numel():
            worst = max(worst, float((a - b).abs().nan_to_num().max()))
    limit = 0.0 if case.exact else 2e-2
    place.check(worst <= limit, f"differs from the reference by {worst}")
    ours_s, reference_s = _time(place, case.ours), _time(place, case.reference)
    rate = case.num_bytes / ours_s / 1e9
    return {
        "bytes": case.num_bytes,
        "ours_us": ours_s * 1e6,
        "reference_us": reference_s * 1e6,
        "gb_per_s": rate,
        "of_copy_bandwidth": rate / copied["gb_per_s"],
        "largest_difference": worst,
    }


def _time(place: Place, run: Callable[[], Any]) -> float:
    """Return the median seconds by CUDA events."""
    times = []
    for _ in range(7 if place.dry else REPEATS + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[5:])


def _draw(*shape: int, seed: int = 0, dtype: Any = torch.bfloat16) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(*shape, generator=random) * 2).to(dtype).cuda()
    assert runs_triton(tensor), "Triton is missing, or does not run here"
    return tensor


def _pack_rows() -> Case:
    rows, width = 4096, 4096
    features = [_draw(rows, width, seed=i) for i in range(3)]
    indices = torch.arange(rows, dtype=torch.int32, device="cuda")
    blocks = [torch.zeros_like(torch.cat(features, dim=-1)) for _ in range(2)]

    def run(function: Any, block: Tensor) -> list[Tensor]:
        function(features, indices, block)
        return [block]

    moved = 2 * blocks[0].nbytes
    ours = lambda: run(pack_rows, blocks[0])  # noqa: E731
    return Case(ours, lambda: run(pack_rows_reference, blocks[1]), moved, exact=True)


def _topk_teacher() -> Case:
    rows, vocab, k = 512, 128_256, 64
    logits = _draw(rows, vocab, dtype=torch.float32)

    def run(function: Any) -> list[Tensor]:
        result = function(logits, k)
        return [result.ids, result.logprobs, result.tail_logprob.exp()]

    moved = logits.numel() * logits.element_size()
    return Case(
        lambda: run(topk_teacher), lambda: run(topk_teacher_reference), moved, False
    )


def _kl_rows() -> Case:
    rows, vocab = 1024, 128_256
    logits, teacher = _draw(rows, vocab), _draw(rows, vocab, seed=1)
    weights = torch.full((rows,), 0.5, device="cuda")
    grads = [torch.empty_like(logits) for _ in range(2)]

    def run(function: Any, grad: Tensor) -> list[Tensor]:
        values = function(logits, teacher, weights, reverse=False, grad_out=grad)
        return [values, grad]

    moved = 3 * logits.numel() * logits.element_size()
    return Case(
        lambda: run(kl_rows, grads[0]),
        lambda: run(kl_rows_reference, grads[1]),
        moved,
        exact=False,
    )


CASES = {
    "pack_rows": _pack_rows,
    "topk_teacher": _topk_teacher,
    "kl_rows": _kl_rows,
}
