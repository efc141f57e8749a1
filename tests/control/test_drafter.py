import itertools

import numpy as np
import pytest

from tests.control.toys import published
from vllm_tide.control.batch import Batch
from vllm_tide.control.costs import RoundCosts
from vllm_tide.control.drafter import Drafter
from vllm_tide.control.history import CENTRES, GRID, GRID_STEP, History
from vllm_tide.control.time_model import ForwardModel, TimeModel


def batch_of(n, k, limit=np.inf):
    return Batch(
        slots=np.arange(n),
        context=np.full(n, 100),
        room=np.full(n, k),
        sampled=np.zeros(n, bool),
        limit=np.full(n, limit),
        first_rows=n,
    )


def certain_history(k, n, bins):
    """Position j's conditional acceptance is exp(-bins[j] * GRID_STEP), for sure."""
    history = History(k, n)
    history._prior = np.zeros((len(CENTRES), GRID))
    history._counts[:] = 0.0
    for j, b in enumerate(bins):
        history._counts[:, j, b] = 1e12
    history.refresh()
    return history


def stairs_model(rng, draft):
    sizes = tuple(np.cumsum(rng.integers(1, 4, 8)).tolist())
    knots = tuple(range(1, 40))
    seconds = tuple((1.0 + np.cumsum(rng.random(39) * 0.25)).tolist())
    d = ForwardModel((1,), (draft,), 0.0)
    return TimeModel(ForwardModel(knots, seconds, 0.0, sizes=sizes), d, d)


def best_value(depths, costs, step, bar):
    """Brute force over all prefix sets of what is drafted; depths [step, n] bins."""
    n = costs.requests
    survival = np.exp(-GRID_STEP * depths[:step])
    best = -np.inf
    for lengths in itertools.product(range(step + 1), repeat=n):
        expect = n + sum(survival[:v, i].sum() for i, v in enumerate(lengths))
        spent = costs.target[sum(lengths)] + costs.draft[step]
        if spent > costs.limit and sum(lengths):
            continue
        best = max(best, expect / spent if bar is None else expect - bar * spent)
    return best


@pytest.mark.parametrize("barred", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_equals_brute_force_when_predictions_are_exact(n, barred):
    rng = np.random.default_rng(n + 10 * barred)
    k, checked, looked_past = 4, 0, 0
    while checked < 120:
        ahead = rng.integers(1, 6, k)
        drafted = rng.integers(1, 9, (k, n))
        step = int(rng.integers(1, k))
        conditional = np.concatenate(
            [drafted[:step], np.broadcast_to(ahead[step:, None], (k - step, n))]
        )
        depths = np.cumsum(conditional, axis=0)
        if len(np.unique(depths)) < depths.size or depths.max() >= GRID - 1:
            continue  # equal survivals: only whole bins are compared
        checked += 1
        batch = batch_of(n, k)
        costs = RoundCosts(stairs_model(rng, rng.uniform(0.01, 0.3)), batch, k)
        bar = n / costs.plain * rng.uniform(0.8, 2.5) if barred else None
        drafter = Drafter(k, certain_history(k, n, ahead))
        drafter.begin(batch.slots, batch.room, costs)
        for s in range(1, step + 1):
            depth = depths[s - 1] * GRID_STEP
            go = drafter.go_on(s, depth, np.exp(-depth), batch.room, costs, bar)
        values = [best_value(depths, costs, s, bar) for s in range(step, k + 1)]
        if abs(max(values[1:]) - values[0]) > 1e-6 * abs(values[0]):
            assert go == (max(values[1:]) > values[0])
            looked_past += go and values[1] < values[0]
    assert looked_past > 0  # some decisions hung on a length beyond the next


@pytest.mark.parametrize("n", [1, 2])
def test_forecast_equals_brute_force_when_predictions_are_exact(n):
    rng = np.random.default_rng(n)
    k = 4
    for _ in range(60):
        bins = rng.integers(1, 9, k)
        batch = batch_of(n, k)
        model = stairs_model(rng, rng.uniform(0.01, 0.3))
        costs = RoundCosts(model, batch, k)
        drafter = Drafter(k, certain_history(k, n, bins))
        forecast = drafter.begin(batch.slots, batch.room, costs)
        # All requests are alike, so sets are whole positions.
        survival = np.exp(-GRID_STEP * np.cumsum(bins))
        best = max(
            n * (1 + survival[:v].sum()) / (costs.target[n * v] + costs.draft[s])
            for s in range(1, k + 1)
            for v in range(1, s + 1)
        )
        found = forecast.tokens / forecast.seconds
        assert found == pytest.approx(best, rel=1e-6)
        assert forecast.free == pytest.approx(best, rel=1e-6)


def test_limit_bounds_the_forecast_and_the_stop():
    n, k = 4, 5
    batch = batch_of(n, k)
    model = published("Qwen3-235B")
    free = RoundCosts(model, batch, k)
    drafter = Drafter(k, certain_history(k, n, [1] * k))
    unlimited = drafter.begin(batch.slots, batch.room, free)
    assert unlimited.steps == k
    limit = float(free.target[4] + free.draft[2]) + 1e-9
    costs = RoundCosts(model, batch_of(n, k, limit), k)
    assert costs.limit == limit and not costs.missed
    limited = drafter.begin(batch.slots, batch.room, costs)
    assert 1 <= limited.steps < k and limited.seconds <= limit
    assert limited.free == pytest.approx(unlimited.tokens / unlimited.seconds)
    depth = np.full(n, 0.1)
    assert drafter.go_on(1, depth, np.exp(-depth), batch.room, free, None)
    tight = RoundCosts(model, batch_of(n, k, free.plain + free.draft[1]), k)
    drafter.begin(batch.slots, batch.room, tight)
    assert not drafter.go_on(1, depth, np.exp(-depth), batch.room, tight, None)


def test_hopeless_limits_do_not_bind():
    batch = batch_of(3, 4)
    model = published("Qwen3-235B")
    plain = RoundCosts(model, batch, 4).plain
    batch.limit[:] = [0.5 * plain, 1.1 * plain, np.inf]
    costs = RoundCosts(model, batch, 4)
    assert costs.limit == 1.1 * plain and not costs.missed
    batch.limit[1] = 99.0  # nothing exceeds it
    assert RoundCosts(model, batch, 4).limit == np.inf
    batch.limit[:] = 0.5 * plain
    for others in (0.5 * plain, np.inf):  # that of a request without a limit
        batch.limit[1:] = others
        costs = RoundCosts(model, batch, 4)
        assert costs.limit == np.inf and costs.missed


def test_requests_without_room_are_not_counted():
    n, k = 4, 5
    batch = batch_of(n, k)
    batch.room[:] = [0, 5, 0, 0]
    costs = RoundCosts(published("Llama-3.3-70B"), batch, k)
    drafter = Drafter(k, certain_history(k, n, [1] * k))
    forecast = drafter.begin(batch.slots, batch.room, costs)
    assert forecast.tokens <= n + k
    survival = np.exp(-GRID_STEP * np.arange(1, k + 1)).sum()
    assert forecast.tokens == pytest.approx(n + survival)
    depth = np.full(n, 0.1)
    batch.room[:] = [0, 1, 0, 0]
    assert not drafter.go_on(1, depth, np.exp(-depth), batch.room, costs, None)


@pytest.mark.parametrize("n", [1, 5, 40])
def test_shortcuts_decide_like_the_full_comparison(n, monkeypatch):
    rng = np.random.default_rng(n)
    k, taken, checked = 7, 0, 0
    history = History(k, n)
    for _ in range(30):
        logit = rng.normal(1.0, 1.5, (k, n))
        drafted = np.ones((k, n), bool)
        history.learn(np.arange(n), logit, 1 / (1 + np.exp(-logit)), drafted)
    history.refresh()
    for _ in range(150):
        batch = batch_of(n, k)
        batch.room[:] = rng.integers(0 if n > 1 else 1, k + 1, n)
        most = int(batch.room.max())
        costs = RoundCosts(published("Llama-4-Scout"), batch, most)
        bar = n / costs.plain * rng.uniform(0.9, 2.5)
        drafter = Drafter(k, history)
        drafter.begin(batch.slots, batch.room, costs)
        depth = np.zeros(n)
        for step in range(1, most + 1):
            depth = depth + np.log1p(np.exp(-rng.normal(1.0, 1.5, n)))
            state = drafter._drafted.copy()
            args = (step, depth, np.exp(-depth), batch.room, costs, bar)
            quick = drafter.go_on(*args)
            drafter._drafted[:] = state
            with monkeypatch.context() as patch:
                patch.setattr(drafter, "_shortcut", lambda *_: None)
                full = drafter.go_on(*args)
            checked += 1
            taken += quick == full
    # The full comparison has coarser bins: rounds at the margin may differ.
    assert taken >= 0.99 * checked


def test_an_older_forecast_serves_only_far_from_the_threshold():
    n, k = 16, 5
    batch = batch_of(n, k)
    costs = RoundCosts(published("Llama-3.3-70B"), batch, k)
    drafter = Drafter(k, certain_history(k, n, [2] * k))
    first = drafter.begin(batch.slots, batch.room, costs, enough=1.02)
    gain = first.tokens / first.seconds / (n / costs.plain)
    again = drafter.begin(batch.slots, batch.room, costs, enough=1.02)
    assert again.tokens == pytest.approx(first.tokens) and drafter._reused == 1
    assert again.steps == first.steps > 1
    assert drafter.begin(batch.slots, batch.room, costs, enough=gain * 1.01) == first
    assert drafter._reused == 0
