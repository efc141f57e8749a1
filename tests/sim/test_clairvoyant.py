import itertools

import numpy as np
import pytest

from sim.clairvoyant import ClairvoyantPolicy, batch_candidates
from sim.dynamic import DynamicPolicy, tune
from sim.engine import simulate
from sim.state import Server
from sim.truth import Truth
from tests.sim import toys
from vllm_tide.control.batch import Batch
from vllm_tide.control.time_model import ForwardModel, TimeModel

STAIRS = TimeModel(
    ForwardModel((4, 5, 8, 9, 12, 13), (5e-3, 6e-3, 6e-3, 7e-3, 7e-3, 8e-3), 0.0),
    toys.DRAFT,
    toys.DRAFT,
    host=0.0005,
)


def batch(n, caps):
    return Batch(
        slots=np.arange(n),
        context=np.full(n, 10),
        caps=np.array(caps),
        sampled=np.zeros(n, bool),
        limit=np.full(n, np.inf),
        first_rows=n,
    )


def brute(survival, model, shown):
    n, top = survival.shape
    best = (0.0, 0, ())
    for steps in range(top + 1):
        for lengths in itertools.product(range(steps + 1), repeat=n):
            if any(
                length > caps for length, caps in zip(lengths, shown.caps, strict=True)
            ):
                continue
            expected = n + sum(survival[i, :k].sum() for i, k in enumerate(lengths))
            seconds = model.step_seconds(
                requests=n,
                context=int(shown.context.sum()),
                verified=sum(lengths),
                prefill=0,
                steps=steps,
                first_rows=n,
            )
            best = max(best, (expected / seconds, steps, lengths))
    return best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", [toys.MODEL, STAIRS])
def test_no_policy_is_better(seed, model):
    rng = np.random.default_rng(seed)
    n, top = 3, 3
    survival = np.cumprod(rng.random((n, top)) ** 0.3, axis=1).astype(np.float32)
    shown = batch(n, rng.integers(0, top + 1, n))
    survival[np.arange(top) >= shown.caps[:, None]] = 0.0
    best = batch_candidates(survival, n, model, shown)
    rate, steps, lengths = brute(survival, model, shown)
    assert best.rate.max() == pytest.approx(rate, rel=1e-6)
    taken = best.lengths(int(best.rate.argmax()), n)
    assert int(best.rate.argmax()) == steps
    assert taken.tolist() == list(lengths)


def test_the_policy_drafts_as_planned_and_has_no_catchup():
    trace = toys.trace((0.0, 5, 12))
    process = toys.process(trace, runs=3, top=3, survival=0.95)
    policy = ClairvoyantPolicy(toys.MODEL)
    result = simulate(trace, process, Truth(toys.MODEL), Server(), policy)
    assert result.output_tokens == 12
    assert result.accepted == result.verified > 0
    hopeless = toys.process(trace, runs=0, top=3, survival=0.01)
    policy = ClairvoyantPolicy(toys.MODEL)
    result = simulate(trace, hopeless, Truth(toys.MODEL), Server(), policy)
    assert result.drafted == 0


def test_the_dynamic_table_is_the_argmax_and_zero_includes_a_pass():
    survival = np.array([0.7, 0.5, 0.3])
    lengths = tune(toys.MODEL, survival, 64, 100)
    assert lengths[1] == 3
    assert (np.diff(lengths[1:]) <= 0).all()
    hopeless = tune(toys.MODEL, np.array([0.001, 0.0, 0.0]), 4, 100)
    assert hopeless.tolist() == [0] * 5
    trace = toys.trace((0.0, 1, 3))
    process = toys.process(trace, 0, 3)
    result = simulate(
        trace, process, Truth(toys.MODEL), Server(), DynamicPolicy(hopeless)
    )
    assert result.busy_s == pytest.approx(3 * (0.0101 + 0.001))
