"""Control of asynchronous Model Runner V2 with one depth per batch."""

import pytest

from sim.acceptance import REGIMES, make_process
from sim.arrivals import synthetic
from sim.engine import simulate
from sim.one_depth import LAG, OneDepth
from sim.state import Server
from sim.suite import Options, run_cell, suite_cells
from sim.truth import Truth
from vllm_tide.engine.adaptive_arguments import offered

TRACE = synthetic("fluctuating", 20.0, 4.0, seed=0).clipped(256)
OPTIONS = Options(by_progress=True)


def test_a_depth_is_an_offered_one_with_the_engines_delay():
    [cell] = suite_cells("quick", [TRACE.window(4.0)], regimes=["high"])
    drafted, verified, expected = [], [], []

    class Watched(OneDepth):
        def learn(self, step, now):
            drafted.append(step.steps)
            verified.append(int(step.drafts.max()))
            super().learn(step, now)
            expected.append(self.coming[-1])

    policy = Watched(cell.time, OPTIONS.top, Server())
    process = make_process(cell.trace, REGIMES["high"], OPTIONS.top, 0)
    result = simulate(cell.trace, process, Truth(cell.time), Server(), policy)
    assert result.output_tokens == cell.trace.output.sum()
    assert result.stats["steps"] == len(drafted) == result.steps
    assert set(drafted) <= set(offered(7, 256))
    assert len(set(expected)) > 1
    assert drafted[:LAG] == [7] * LAG
    assert drafted[LAG:] == expected[: len(drafted) - LAG]
    # Only lengths above a cap are cut.
    assert all(v <= d for v, d in zip(verified[1:], drafted, strict=False))
    assert result.verified > 0.9 * result.drafted


@pytest.mark.parametrize(("model", "regime"), [(0, "high"), (3, "low")])
def test_it_is_not_worse_than_vllms_schedule(model, regime):
    cell = suite_cells("published", [TRACE], regimes=[regime])[model]
    row = run_cell(cell, ("vllm_dynamic", "one_depth"), OPTIONS)
    throughput = row["throughput"]
    assert throughput["one_depth"] > 0.99 * throughput["vllm_dynamic"]
