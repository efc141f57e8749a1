"""A fast draft as a low-rank change of its base draft."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.draft import delta
from vllm_tide.draft.config import DraftError

ROWS, COLUMNS = 160, 224


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def base(request):
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(request.param)

    return {
        "fc.weight": normal(ROWS, COLUMNS),
        "frozen.weight": normal(COLUMNS, ROWS),
        "small.weight": normal(40, 40),
        "norm.weight": normal(COLUMNS),
        "d2t": torch.arange(ROWS),
    }


def product(rank, scale=0.1, seed=1):
    """Return a matrix of a rank with entries of about `scale`."""
    random = torch.Generator().manual_seed(seed)
    u = torch.randn(ROWS, rank, generator=random)
    v = torch.randn(rank, COLUMNS, generator=random)
    return scale * rank**-0.5 * u @ v


def masters(base):
    return {n: t.float() if t.is_floating_point() else t for n, t in base.items()}


def test_a_change_within_the_rank_is_restored(base):
    weights = masters(base)
    change = product(delta.RANK)
    fast = weights | {
        "fc.weight": weights["fc.weight"] + change,
        "small.weight": weights["small.weight"] + 0.5,
        "norm.weight": weights["norm.weight"] * 2,
    }
    factors = delta.factors(weights, fast)
    assert {n: tuple(t.shape) for n, t in factors.items()} == {
        "fc.weight.u": (ROWS, delta.RANK),
        "fc.weight.v": (delta.RANK, COLUMNS),
        "small.weight": (40, 40),  # factors would be larger
        "norm.weight": (COLUMNS,),
    }
    made = delta.apply(weights, factors)
    for name, want in fast.items():
        torch.testing.assert_close(made[name], want, rtol=1e-4, atol=1e-4)
    assert made["frozen.weight"] is weights["frozen.weight"]
    # Onto the checkpoint: as if the masters had been rounded to its type.
    served = delta.apply(base, factors)
    assert served.keys() == base.keys()
    for name, old in base.items():
        assert served[name].dtype == old.dtype
        want = fast[name].to(old.dtype)
        # A rounding apart at most.
        torch.testing.assert_close(served[name], want, rtol=2**-7, atol=1e-4)
    assert not torch.equal(served["fc.weight"], base["fc.weight"])


def test_a_change_of_higher_rank_is_approximated_as_well_as_possible(base):
    weights = masters(base)
    noise = torch.Generator().manual_seed(2)
    change = 0.1 * torch.randn(ROWS, COLUMNS, generator=noise) + 10 * product(5)
    fast = weights | {"fc.weight": weights["fc.weight"] + change}
    for rank in (1, 8, delta.RANK):
        made = delta.apply(weights, delta.factors(weights, fast, rank))
        missed = torch.linalg.norm(fast["fc.weight"] - made["fc.weight"])
        # Eckart and Young: no matrix of the rank is nearer than the remaining singular
        # values; 4 % more for the randomised decomposition.
        least = torch.linalg.svdvals(change)[rank:].norm()
        assert least * 0.999 <= missed <= 1.04 * least


def test_no_change_is_no_tensor_and_the_base_bit_by_bit(base):
    assert delta.factors(base, {n: t.clone() for n, t in base.items()}) == {}
    made = delta.apply(base, {})
    assert all(torch.equal(made[name], t) for name, t in base.items())
    assert delta.fingerprint(made) == delta.fingerprint(base)


def test_the_fingerprint_covers_names_values_and_types(base):
    name = delta.fingerprint(base)
    assert name == delta.fingerprint(dict(reversed(base.items())))
    assert name == delta.fingerprint(base | {"t2d": torch.ones(3, dtype=torch.bool)})
    bumped = base["norm.weight"].clone()
    bumped[3] += 1
    other = {"norm.weight": bumped, "d2t": base["d2t"] + 1}
    others = [base | {key: value} for key, value in other.items()]
    others.append({n: t for n, t in base.items() if n != "small.weight"})
    assert name not in {delta.fingerprint(tensors) for tensors in others}


def test_a_base_is_read_once_and_on_demand(base):
    reads = []
    lazy = delta.Base(lambda: reads.append(1) or base)
    assert not reads
    assert lazy.fingerprint == delta.fingerprint(base) and lazy.tensors is base
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d2t": torch.arange(ROWS) + 1}, "d2t differs from the base's"),
        ({"extra": torch.ones(3)}, "only one of the drafts has extra"),
        ({"fc.weight": torch.full((ROWS, COLUMNS), torch.inf)}, "fc.weight has NaN"),
    ],
)
def test_drafts_that_do_not_fit_give_no_change(base, wrong, message):
    fast = {n: t for n, t in (masters(base) | wrong).items() if t is not None}
    with pytest.raises(DraftError, match=f"draft change: .*{message}"):
        delta.factors(masters(base), fast)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d2t": torch.arange(ROWS) + 1}, "d2t differs from the base's"),
        ({"norm.weight": torch.ones(3)}, "has shape .3,., the base has .224,"),
        ({"norm.weight": torch.full((COLUMNS,), torch.nan)}, "norm.weight has NaN"),
        ({"fc.weight.u": None}, "fc.weight has only one of two factors"),
        ({"fc.weight.u": torch.ones(COLUMNS, 4)}, "factors .224, 4. and .4, 224. of"),
        ({"fc.weight.v": torch.full((4, COLUMNS), 1e38)}, "fc.weight has NaN or inf"),
        ({"extra": torch.ones(3)}, "extra is not a tensor of the base"),
        ({"d2t.u": torch.ones(ROWS, 1), "d2t.v": torch.ones(1, 1)}, "of d2t do not"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(base, wrong, message):
    good = {
        "fc.weight.u": torch.full((ROWS, 4), 1e3),
        "fc.weight.v": torch.ones(4, COLUMNS),
    }
    assert delta.apply(base, good)["fc.weight"].float().mean() > 3900
    factors = {name: t for name, t in (good | wrong).items() if t is not None}
    with pytest.raises(DraftError, match=f"draft change: .*{message}"):
        delta.apply(base, factors)
