import numpy as np
import pytest

from sim.engine import progress_at_arrival, simulate
from sim.state import Server
from sim.truth import Mismatch, Truth
from tests.sim import toys


def play(trace, policy, runs=2, top=3, server=None, model=toys.MODEL, **more):
    process = toys.process(trace, runs, top)
    return simulate(trace, process, Truth(model), server or Server(), policy, **more)


def test_plain_decoding_by_hand():
    # Prefill of 100 tokens: 20 ms, writes one; three more tokens at 10.1 ms.
    result = play(toys.trace((1.0, 100, 4)), None)
    assert result.steps == 4
    assert result.output_tokens == 4
    assert result.busy_s == pytest.approx(0.02 + 3 * 0.0101)
    assert result.e2e[0] == pytest.approx(result.busy_s)
    assert result.tpot[0] == pytest.approx(0.0101)
    assert result.throughput == pytest.approx(4 / result.busy_s)


def test_speculation_by_hand():
    policy = toys.Scripted(3, stop=2)
    result = play(toys.trace((0.0, 100, 8)), policy, runs=1)
    # 1 token, then steps of 2 drafts, 1 accepted, 2 tokens: 3, 5, 7; then the cap is 0.
    assert result.output_tokens == 8
    assert result.steps == 5
    assert (result.verified, result.accepted) == (6, 3)
    assert result.drafted == 2 * 5
    drafts = 5 * 0.002
    assert result.busy_s == pytest.approx(0.02 + 3 * 0.0103 + 0.0101 + drafts)


def test_calls_come_in_the_adapters_order():
    policy = toys.Scripted(2)
    play(toys.trace((0.0, 5, 4)), policy, runs=2)
    one = ["observe", "plan", "go_on1", "go_on2", "choose"]
    assert policy.calls == ["add0", *one, *one]
    first, last = policy.batches
    assert first.caps.tolist() == [2] and last.caps.tolist() == [0]
    assert first.context.tolist() == [5] and last.context.tolist() == [8]
    assert (first.first_rows, last.first_rows) == (5, 3)
    outcome = policy.outcomes[1]
    assert outcome.verified.tolist() == [2]
    assert outcome.accepted.tolist() == [2]
    assert outcome.emitted.tolist() == [3]
    sample = outcome.sample
    assert (sample.requests, sample.context, sample.verified) == (1, 0, 0)
    assert (sample.prefill, sample.steps, sample.first_rows) == (4, 2, 5)
    assert sample.target_s == pytest.approx(0.0105)
    assert sample.draft_first_s == pytest.approx(0.001)
    assert sample.draft_next_s == pytest.approx(0.001)


def test_prefill_is_chunked_within_the_budget():
    seen = []

    class Watch(toys.Scripted):
        def observe(self, outcome):
            super().observe(outcome)
            seen.append(outcome.emitted.tolist())

    policy = Watch(0)
    server = Server(max_num_seqs=8, max_num_batched_tokens=100)
    trace = toys.trace((0.0, 150, 3), (0.0, 30, 3), (0.0, 40, 2))
    result = play(trace, policy, server=server)
    rows = [batch.first_rows for batch in policy.batches]
    assert max(rows) <= 100
    # 100 of the first; 50 + 30 + 20 of the others; then the third's last 20.
    assert seen[:3] == [[0], [1, 1, 0], [1, 1, 1]]
    assert result.output_tokens == 8


def test_max_num_seqs_makes_requests_wait():
    server = Server(max_num_seqs=2)
    trace = toys.trace(*[(0.0, 10, 5)] * 5)
    policy = toys.Scripted(0)
    result = play(trace, policy, server=server)
    assert max(len(batch.slots) for batch in policy.batches) == 2
    assert result.output_tokens == 25
    assert (np.diff(result.e2e) >= 0).all()
    assert policy.calls.count("add0") + policy.calls.count("add1") == 5


def test_missed_rows_are_caught_up_once():
    # Off for two steps (5 prompt rows, 1 row), then on.
    policy = toys.Scripted(0, 0, 1)
    result = play(toys.trace((0.0, 5, 6)), policy, runs=0)
    missed = [batch.catchup_rows for batch in policy.batches]
    assert missed == [0, 5, 6, 0, 0, 0]
    drafts = (4 + 1) * 0.001  # and the pass that catches up
    rows = [5, 1, 1, 2, 2, 1]  # a draft from the third step on; cap 0 at the end
    target = sum(0.01 + 0.0001 * n for n in rows)
    assert result.busy_s == pytest.approx(target + drafts)


def test_idle_time_is_not_busy_time():
    result = play(toys.trace((0.0, 1, 2), (50.0, 1, 2)), None)
    assert result.busy_s == pytest.approx(4 * 0.0101)
    assert result.e2e.tolist() == pytest.approx([0.0202, 0.0202])


def test_all_arms_have_the_same_load_with_by_progress():
    trace = toys.trace(*[(0.03 * i, 10, 40) for i in range(30)])
    plain = play(trace, None)
    due = progress_at_arrival(trace, plain)
    again = play(trace, None, due=due)
    assert again.mean_batch == pytest.approx(plain.mean_batch, rel=0.1)
    fast = play(trace, toys.Scripted(3), runs=3)
    fair = play(trace, toys.Scripted(3), runs=3, due=due)
    assert fast.mean_batch < 0.7 * plain.mean_batch
    assert fair.mean_batch == pytest.approx(plain.mean_batch, rel=0.15)
    assert fair.throughput > fast.throughput
    assert fair.output_tokens == plain.output_tokens == 1200


def test_noise_is_in_the_clock_and_not_in_time():
    truth = Truth(toys.MODEL, noise=0.2, seed=1)
    measured = np.array([truth.measured(1.0) for _ in range(3000)])
    assert np.log(measured).std() == pytest.approx(0.2, rel=0.1)
    assert truth.target(1, 0, 0, 0) == pytest.approx(0.0101)
    again = Truth(toys.MODEL, noise=0.2, seed=1)
    assert again.measured(1.0) == measured[0]


def test_a_wrong_model_is_wrong_by_its_factors():
    assumed = Mismatch(target=1.5, draft=0.5).initial_model(toys.MODEL)
    assert assumed.target(1, 0) == pytest.approx(0.0101 * 1.5)
    assert assumed.draft_first(1, 0) == pytest.approx(0.0005)
