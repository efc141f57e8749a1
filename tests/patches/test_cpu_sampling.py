"""Patch fix-cpu-expand-and-placeholder-sampling: sampling on a CPU is lossless.

The unit part calls the functions that the CPU platform puts in place of the Triton
kernels; the rest samples a toy target with and without a toy draft, in real vLLM.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.forked import run_forked

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")

PROBE = Path(__file__).with_name("sampling_probe.py")
SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 6},
]
NUM_SAMPLES = 256


@pytest.fixture(scope="module")
def kernels() -> Any:
    import vllm.platforms

    if not vllm.platforms.current_platform.is_cpu():
        pytest.skip("the CPU backend is not the platform here")
    vllm.platforms.current_platform.import_kernels()
    from vllm.utils import cpu_triton_utils

    return cpu_triton_utils


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize(
    ("counts", "replace"), [([1, 3, 2], (0, 1)), ([0, 4, 0], (2, 7)), ([0, 0], (0, 0))]
)
def test_expand_equals_a_reference(
    kernels: Any, dtype: Any, counts: list[int], replace: tuple[int, int]
) -> None:
    values = (torch.arange(len(counts)) % 4).to(dtype)
    if dtype.is_floating_point:
        values += torch.where(values > 2, 0.25, 0.0)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    expected = [
        replace[1] if value == replace[0] else value
        for value, count in zip(values.tolist(), counts, strict=True)
        for _ in range(count)
    ]
    # Poisoned, so that memory without a write cannot look right.
    output = torch.full((sum(counts),), -99, dtype=dtype)
    before = values.clone()
    kernels._expand_kernel_impl(output, values, ends, *replace, MAX_NUM_TOKENS=32)
    assert output.tolist() == expected
    assert output.dtype == dtype
    assert torch.equal(values, before)


def random_sample(
    kernels: Any, drafts: list[int], poison: float, *, with_draft_probs: bool
) -> list[int]:
    """One request; row i of the target prefers token i. Returns its output row."""
    num, vocab = len(drafts), 8
    # The float before the first row is what index -1 reads.
    memory = torch.full((1 + num * vocab,), poison)
    target = memory[1:].view(num, vocab)
    target.fill_(0.1 / (vocab - 1))
    target[torch.arange(num), torch.arange(num)] = 0.9
    draft_probs = None
    if with_draft_probs:
        draft_memory = torch.full((1 + num * vocab,), 1e-30)
        draft_probs = draft_memory[1:].view(num, vocab)
        draft_probs.fill_(1 / vocab)
    output = torch.full((1, num + 1), -1, dtype=torch.int32)
    kernels._rejection_random_sample_kernel_impl(
        output,
        torch.tensor([num], dtype=torch.int32),
        torch.tensor(drafts, dtype=torch.int32),
        draft_probs,
        target,
        torch.tensor([[7]], dtype=torch.int32),
        torch.full((num,), 6, dtype=torch.int32),
        torch.full((num,), 0.5, dtype=torch.float64),
        torch.tensor([False]),
        num,
        vocab,
        NO_DRAFT_PROBS=draft_probs is None,
    )
    return output[0].tolist()


@pytest.mark.parametrize("with_draft_probs", [False, True])
@pytest.mark.parametrize("poison", [0.0, 1.0, float("inf")])
def test_placeholder_is_rejected_whatever_lies_before_the_row(
    kernels: Any, poison: float, with_draft_probs: bool
) -> None:
    def sample(drafts: list[int]) -> list[int]:
        return random_sample(kernels, drafts, poison, with_draft_probs=with_draft_probs)

    assert sample([-1, 1]) == [6, -1, -1]
    assert sample([0, -1]) == [0, 6, -1]
    # Token 0 is what a clamped placeholder would be, and row 0 prefers it.
    assert sample([-1]) == [6, -1]
    assert sample([0, 1]) == [0, 1, 7]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory, kernels: Any) -> list[Any]:
    from tests import toys

    folder = tmp_path_factory.mktemp("sampling")
    target = toys.make_target(folder / "target")
    draft = toys.make_draft(folder / "draft", target)
    reports = []
    for seed, chosen in enumerate((None, str(draft))):
        case = {
            "target": str(target),
            "draft": chosen,
            "num_samples": NUM_SAMPLES,
            "sampling": SAMPLING,
            "seed": seed,
        }
        done = run_forked([str(PROBE), json.dumps(case)])
        lines = [x for x in done.stdout.splitlines() if x.startswith("REPORT ")]
        assert lines, done.stderr[-3000:]
        reports.append(json.loads(lines[-1].removeprefix("REPORT ")))
    assert reports[0]["drafted"] == 0
    assert reports[1]["drafted"] >= len(SAMPLING) * NUM_SAMPLES
    return list(zip(*(report["tokens"] for report in reports), strict=True))


def test_top_k_accepts_a_step_without_draft_rows(kernels: Any) -> None:
    """Patch accept-a-step-without-draft-rows-in-top-k-sampling."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

    nothing = apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))
    assert nothing.shape == (0, 8)
    rows = torch.arange(8.0).repeat(2, 1)
    num_finite = apply_top_k_only(rows, torch.tensor([2, 8])).isfinite().sum(-1)
    assert num_finite.tolist() == [2, 8]


def chi_square_p(a: list[int], b: list[int]) -> float:
    """Return the p-value of a two-sample chi-square, with rare tokens combined."""
    from scipy.stats import chi2_contingency

    one, two = Counter(a), Counter(b)
    common = [t for t in one | two if one[t] + two[t] >= 16]
    rows = [[one[t], two[t]] for t in common]
    others = [len(a) - sum(r[0] for r in rows), len(b) - sum(r[1] for r in rows)]
    if sum(others) >= 16:
        rows.append(others)
    return 1.0 if len(rows) < 2 else float(chi2_contingency(rows).pvalue)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(SAMPLING)))
def test_speculation_keeps_the_distribution_of_samples(
    samples: list[Any], number: int
) -> None:
    plain, speculative = samples[number]
    for position in range(4):
        a = [tokens[position] for tokens in plain]
        b = [tokens[position] for tokens in speculative]
        # Fixed seeds: a pass today is a pass tomorrow. 12 comparisons in all.
        assert chi_square_p(a, b) > 1e-4, (SAMPLING[number], position)
