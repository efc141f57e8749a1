import numpy as np
import pytest

from tests.control.toys import batch_of, published
from vllm_tide.control.costs import CLIENT_SHARE, RoundCosts
from vllm_tide.control.drafter import Drafter
from vllm_tide.control.history import CENTRES, CHANCE, GRID, GRID_STEP, History


def certain_history(k, n, bins):
    """Position j's conditional acceptance is exp(-bins[j] * GRID_STEP), for sure."""
    history = History(k, n)
    history._prior = np.zeros((len(CENTRES), GRID))
    history._counts[:] = 0.0
    for j, b in enumerate(bins):
        history._counts[:, j, b] = 1e12
    history.refresh()
    return history


def go_on(drafter, step, depth, room, costs, bar):
    """`Drafter.go_on`, given -log(survival) of the step's tokens, [n]."""
    values = np.full((3, costs.most, len(depth)), np.nan)
    values[2, step - 1] = np.exp(drafter._depth - depth)
    survival = np.zeros((costs.most, len(depth)), np.float32)
    go = drafter.go_on(step, values, survival, room, room, costs, bar)
    there = np.where(room >= step, np.maximum(np.exp(-depth), 1e-6), -1.0)
    np.testing.assert_allclose(survival[step - 1], there, rtol=1e-5)
    assert not np.delete(survival, step - 1, axis=0).any()
    return go


def seconds_at(costs, verified):
    return np.interp(verified, np.arange(len(costs.target)), costs.target)


def test_limit_bounds_the_forecast_and_the_stop():
    n, k = 4, 5
    batch = batch_of([k] * n)
    model = published("Qwen3-235B")
    free = RoundCosts(model, batch, k)
    drafter = Drafter(certain_history(k, n, [1] * k))
    unlimited = drafter.begin(batch.slots, batch.room, free)
    assert unlimited.steps == k
    limit = float(free.target[4] + free.draft[2]) + 1e-9
    costs = RoundCosts(model, batch_of([k] * n, limit=np.full(n, limit)), k)
    assert costs.limit == limit and not costs.missed
    limited = drafter.begin(batch.slots, batch.room, costs)
    assert 1 <= limited.steps < k and limited.seconds <= limit
    assert limited.free == pytest.approx(unlimited.tokens / unlimited.seconds)
    depth = np.full(n, 0.1)
    assert go_on(drafter, 1, depth, batch.room, free, None)
    tight = RoundCosts(
        model, batch_of([k] * n, limit=np.full(n, free.plain + free.draft[1])), k
    )
    drafter.begin(batch.slots, batch.room, tight)
    assert not go_on(drafter, 1, depth, batch.room, tight, None)


def test_hopeless_limits_do_not_bind():
    batch = batch_of([4] * 3)
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


def taught(rng, k, n):
    history = History(k, n)
    for _ in range(30):
        logit = rng.normal(1.0, 1.5, (k, n))
        drafted = np.ones((k, n), bool)
        history.learn(np.arange(n), logit, 1 / (1 + np.exp(-logit)), drafted)
    history.refresh()
    return history


def best_ahead(history, drafter, costs, step, room, bar):
    """Value of stopping after a step, and of the best longer length: in numpy."""
    n, left = costs.requests, room > step
    bins = np.minimum((drafter._depth / GRID_STEP + 0.5).astype(int), GRID - 1)
    here = np.zeros((len(CENTRES), GRID))
    for half in (slice(None, n), slice(n, None)):
        share = drafter._share[half] * left
        np.add.at(here, (drafter._both[half], bins), share)
    exact = np.exp(-drafter._depth)[left].sum() / (here.sum(axis=0) @ CHANCE)
    tokens, survivors = drafter._drafted.copy()

    def best(steps):
        spent = seconds_at(costs, tokens.cumsum()) + costs.draft[steps]
        expected = n + survivors.cumsum()
        value = expected / spent if bar is None else expected - bar * spent
        return max(value[spent <= costs.limit], default=-np.inf)

    stop = costs.plain + costs.draft[step]
    values = [max(best(step), n / stop if bar is None else n - bar * stop)]
    for j in range(costs.most - step):
        gained = history.gained[step][:, j]
        added = sum(np.convolve(a, b)[:GRID] for a, b in zip(here, gained, strict=True))
        tokens += added
        survivors += added * CHANCE * exact
        values.append(best(step + 1 + j))
    return values[0], max(values[1:])


@pytest.mark.parametrize(("n", "limited"), [(1, False), (5, True), (40, False)])
def test_it_goes_on_where_a_longer_length_is_worth_more(n, limited):
    rng = np.random.default_rng(n)
    k, found = 7, []
    history = taught(rng, k, n)
    for turn in range(60):
        batch = batch_of([k] * n)
        batch.room[:] = rng.integers(0 if n > 1 else 1, k + 1, n)
        most = int(batch.room.max())
        costs = RoundCosts(published("Llama-4-Scout"), batch, most)
        if limited:
            costs.limit = costs.loose = costs.plain * rng.uniform(1.0, 1.5)
        bar = n / costs.plain * rng.uniform(0.9, 2.5) if turn % 2 else None
        drafter = Drafter(history)
        drafter.begin(batch.slots, batch.room, costs)
        depth = np.zeros(n)
        for step in range(1, most):
            depth = depth + np.log1p(np.exp(-rng.normal(1.0, 1.5, n)))
            go = go_on(drafter, step, depth, batch.room, costs, bar)
            stop, more = best_ahead(history, drafter, costs, step, batch.room, bar)
            if abs(more - stop) > 1e-9 * abs(stop):
                assert go == (more > stop)
                found.append(go)
        assert not most or not go_on(drafter, most, depth, batch.room, costs, bar)
    assert 0.05 < np.mean(found) < 0.95


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_forecast_is_the_best_round_of_what_is_expected(n):
    rng = np.random.default_rng(n)
    k = 7
    history, slots = taught(rng, k, n), np.arange(n)
    chosen = set()
    for turn in range(100):
        batch = batch_of([k] * n)
        batch.room[:] = rng.integers(0 if n > 1 else 1, k + 1, n)
        batch.room[-1] = max(batch.room[-1], 1)
        most = int(batch.room.max())
        costs = RoundCosts(published("Llama-4-Scout"), batch, most)
        if turn % 2:
            costs.loose = costs.plain * rng.uniform(0.9, 1.6)
            costs.limit = min(costs.loose, costs.plain * rng.uniform(0.9, 1.6))
        limit, loose = costs.limit, costs.loose
        forecast = Drafter(history).begin(slots, batch.room, costs)
        place, mean, keep = history.levels()
        at = mean + (place[slots] - mean) * keep
        low = at.astype(int)
        weight = np.bincount(low, 1 - at + low, len(CENTRES))
        weight += np.bincount(low + 1, at - low, len(CENTRES))
        sets = (weight @ history.sets).reshape(2, k, GRID)[:, :most]
        counts = [(batch.room > j).mean() for j in range(most)]
        verified, expected = (sets * np.array(counts)[:, None]).cumsum(axis=1)
        spent = seconds_at(costs, verified) + costs.draft[1:, None]
        rate = (expected + n) / spent
        assert forecast.free == pytest.approx(rate.max())
        best = [rate[spent <= bound].max(initial=0.0) for bound in (limit, loose)]
        kept, free = np.maximum(best, n / costs.plain)
        loosened = limit < loose and kept < CLIENT_SHARE * free
        assert costs.limit == (loose if loosened else limit)
        wanted = best[int(loosened)]
        assert forecast.steps == 0 if not wanted else forecast.steps > 0
        if wanted:
            assert forecast.tokens / forecast.seconds == pytest.approx(wanted)
        chosen.add((bool(forecast.steps), loosened))
    assert chosen >= {(True, False), (True, True), (False, False)}


def test_arrays_that_do_not_fit_are_refused():
    n, k = 3, 4
    batch = batch_of([k] * n)
    costs = RoundCosts(published("Llama-4-Scout"), batch, k)
    drafter = Drafter(History(k, n))
    with pytest.raises(ValueError, match="a slot or a row lies outside"):
        drafter.begin(batch.slots + 1, batch.room, costs)
    with pytest.raises(ValueError, match="room has 16 bytes, not 24"):
        drafter.begin(batch.slots, batch.room[1:], costs)
    drafter.begin(batch.slots, batch.room, costs)
    values, survival = np.ones((3, k, n)), np.zeros((k, n), np.float32)
    given = values, survival, batch.room, batch.room, costs, None
    for step in (0, k + 1):
        with pytest.raises(ValueError, match="no such step"):
            drafter.go_on(step, *given)
    with pytest.raises(ValueError, match="survival has"):
        drafter.go_on(1, values, survival[1:], *given[2:])
