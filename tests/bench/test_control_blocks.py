import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from bench.harness.arms import make_arms
from bench.harness.blocks import (
    Cell,
    best_arm,
    cell_rows,
    drift,
    plan,
    ratio_of,
    t_975,
    verdict,
)
from bench.harness.common import BenchError
from bench.suites import control
from bench.suites.control import ControlDocument, ControlOptions, ControlRun
from tests.bench.control_report import RATES, visits

ARMS = make_arms(["static1", "none", "static3", "adaspec"])
CELLS = [Cell(d, batch=b) for b in (1, 4) for d in ("matched", "mixed")]


@pytest.mark.parametrize("df", [*range(1, 13), 30, 200])
def test_the_quantile_is_students(df):
    assert t_975(df) == pytest.approx(stats.t.ppf(0.975, df), abs=1e-3)


def test_a_ratio_has_the_t_interval_of_its_logarithms():
    logs = np.log([1.02, 0.97, 1.05, 1.01, 0.99])
    mean, low, high = ratio_of(list(logs))
    wanted = stats.t.interval(0.95, 4, logs.mean(), stats.sem(logs))
    assert mean == pytest.approx(stats.gmean(np.exp(logs)))
    assert (low, high) == pytest.approx(tuple(np.exp(wanted)), rel=1e-4)
    assert ratio_of([0.1]) == (pytest.approx(math.exp(0.1)), None, None)


def test_the_other_half_says_more_of_the_spread_and_nothing_of_the_mean():
    even, odd = [0.01, 0.03], [0.5, 0.52, 0.48]
    mean, low, high = ratio_of(even, odd)
    pooled = math.sqrt((0.0002 + 0.0008) / 3)
    half = stats.t.ppf(0.975, 3) * pooled / math.sqrt(2)
    wanted = [math.exp(0.02 + x) for x in (0, -half, half)]
    assert [mean, low, high] == pytest.approx(wanted, rel=1e-4)


def test_a_block_opens_and_closes_with_none_and_has_every_other_arm_once():
    order = plan(CELLS, ARMS, 3, seed=1)
    assert order == plan(CELLS, ARMS, 3, seed=1) != plan(CELLS, ARMS, 3, seed=2)
    for block in order:
        names = [visit.arm.name for visit in block]
        assert names[0] == names[-1] == "none"
        assert sorted(names[1:-1]) == ["adaspec", "static1", "static3"]
        assert len({(visit.cell, visit.block) for visit in block}) == 1
    # Whole rounds of all cells: a run that is cut short has measured them alike.
    rounds = [order[i : i + 4] for i in range(0, 12, 4)]
    for number, blocks in enumerate(rounds, 1):
        assert {block[0].cell for block in blocks} == set(CELLS)
        assert {block[0].block for block in blocks} == {number}
    many = plan(CELLS, ARMS, 40, seed=3)
    assert len({tuple(v.arm.name for v in block) for block in many}) == 6
    assert (
        len({tuple(b[0].cell for b in many[i : i + 4]) for i in range(0, 160, 4)}) > 9
    )


def row(rows, arm, batch=4, domain="matched"):
    (found,) = (
        r for r in rows if (r["arm"], r["batch"], r["domain"]) == (arm, batch, domain)
    )
    return found


def test_ratios_are_within_a_block_whose_none_is_the_mean_of_its_visits():
    rows = cell_rows(visits(5))  # the machine is 10% faster with each block
    wanted = pytest.approx(1.5 / 1.02**0.5, abs=1e-3)
    assert row(rows, "adaspec")["ratio_to_none"] == wanted
    assert row(rows, "adaspec")["ratio_low"] == wanted
    assert row(rows, "static1")["ratio_to_best"] == pytest.approx(0.8, abs=1e-3)
    assert row(rows, "none")["drift"] == {"mean": 1.02, "largest": 0.0198}
    assert row(rows, "none")["ratio_high"] == 1.0
    assert row(rows, "static1")["cpu_s_per_token"] == 0.008333
    assert row(rows, "static3")["blocks"] == 5
    assert drift(visits(1)[1:2]) is None


def test_a_winner_by_luck_is_not_the_best_on_the_blocks_it_is_compared_on():
    """Six equal arms: the best of all blocks looks better than any is."""
    rng = random.Random(0)
    lucky, fair = [], []
    for _ in range(200):
        logs = {
            arm: {b: rng.gauss(0.0, 0.05) for b in range(1, 6)}
            for arm in ("none", *"abcde")
        }
        means = [sum(by.values()) / 5 for by in logs.values()]
        lucky.append(max(means) - means[0])
        best = logs[best_arm(logs)]
        fair.append(sum(best[b] - logs["none"][b] for b in (2, 4)) / 2)
    assert np.mean(lucky) > 0.02
    assert abs(np.mean(fair)) < 0.008


def test_the_best_arm_is_of_odd_blocks_and_compared_on_even_ones():
    planted = visits(5)
    for visit in planted:  # three times lucky, and only then
        if visit["arm"] == "static3" and visit["block"] % 2:
            visit["output_tokens_per_s"] *= 2
    rows = cell_rows(planted)
    assert row(rows, "adaspec")["best_arm"] == "static3"
    assert row(rows, "adaspec")["ratio_to_best"] == pytest.approx(150 / 130, abs=1e-3)
    assert row(rows, "static3")["best_low"] == 1.0


def test_with_few_blocks_it_is_said_what_is_not_known():
    rows = cell_rows(visits(2))
    assert row(rows, "static1")["best_low"] is None
    assert row(rows, "static1")["ratio_to_best"] == pytest.approx(0.8, abs=1e-3)
    assert "two blocks: no interval" in verdict(rows)
    rows = cell_rows(visits(1))
    assert row(rows, "adaspec")["ratio_low"] is None
    assert "compared on the block that chose it" in verdict(rows)
    assert verdict([]) == "nothing was measured"
    assert "blocks" not in verdict(cell_rows(visits(3)))


def test_the_verdict_counts_cells_in_which_nothing_is_better():
    planted = visits(5)
    for visit in planted:
        if (visit["batch"], visit["domain"]) == (4, "mixed"):
            visit["output_tokens_per_s"] *= 0.5 if visit["arm"] == "adaspec" else 1.0
    said = verdict(cell_rows(planted))
    assert said.startswith(
        "adaspec: best or within noise of the best in 3 of 4 cells; worst cell batch "
        "4, mixed: 0.577 of static3 (0.5"
    )
    assert "of static3, the best single length" in said


def test_a_visit_of_none_that_failed_leaves_the_block_out():
    planted = [v for v in visits(3) if v["arm"] != "none" or v["block"] != 2]
    assert row(cell_rows(planted), "adaspec")["blocks"] == 2


def options(tmp_path, **more):
    return ControlOptions(
        suite="control",
        json=tmp_path / "run.json",
        work=tmp_path / "work",
        arms=("none", "static1", "adaspec"),
        **{"batches": (1, 4), "domains": ("matched",), "blocks": 3, **more},
    )


def test_the_default_run_is_planned_to_end_in_its_time(tmp_path):
    default = ControlOptions(suite="control", json=tmp_path, work=tmp_path)
    assert (len(default.cells), default.num_blocks, default.num_visits) == (12, 5, 420)
    assert default.visit_s > 8 and "expected 1h09m" in default.size
    alone = replace(default, blocks=0)
    assert (alone.num_visits, alone.record_cell_s, alone.record_s) == (0, 60, 780)
    assert "12 cells recorded for 60 s" in alone.size
    alone.check()
    with pytest.raises(BenchError, match="adaspec"):
        replace(alone, arms=("none", "static3")).check()
    with pytest.raises(BenchError, match="--blocks"):
        replace(alone, blocks=-1).check()
    full = ControlOptions(suite="control", json=tmp_path, work=tmp_path, full=True)
    assert len(full.cells) == 22 and full.num_blocks == 8
    assert "static7" in full.arm_names and full.cells[-1].batch == "ramp"
    assert full.visit_s > 8
    short = options(tmp_path, minutes=6.0)
    assert short.num_visits == 24 and short.limit_s == 360


class FakeRun(ControlRun):
    """A run whose visits are made up."""

    def __init__(self, options, doc, stop_after):
        self.options, self.doc, self.stop_after = options, doc, stop_after
        self.arms = make_arms(options.arm_names)
        self.target = SimpleNamespace(name="90m")
        self.progress = control_progress()
        self.book = SimpleNamespace(to_json=dict)
        self.failures, self.seen, self.tuned = {}, [], 0

    def _start(self, servers, arms):
        pass

    def calibrate(self, servers, batches):
        self.tuned += 1
        self.doc.data["calibration"] = [
            {"arm": "none", "batch": batch, "beside_s": 1.0} for batch in batches
        ]
        return {("none", batch): 40.0 * batch for batch in batches}

    def _visit(self, servers, visit, place):
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        self.seen.append((visit.cell, visit.block, visit.arm.name))
        where = {"batch": visit.cell.batch, "domain": visit.cell.domain}
        record = {"arm": visit.arm.name, "block": visit.block, "place": place}
        rate = RATES[visit.arm.name]
        self.doc.data["visits"].append({**where, **record, "output_tokens_per_s": rate})
        return 1.0


def control_progress():
    return control.PolicyRun.__init__.__globals__["Progress"]()


def test_a_run_that_was_cut_short_goes_on_after_its_last_whole_block(tmp_path):
    doc = ControlDocument(options(tmp_path))
    first = FakeRun(options(tmp_path), doc, stop_after=10)
    with pytest.raises(KeyboardInterrupt):
        first.visits(None)
    doc.write()  # as `conduct` does
    assert len(json.loads((tmp_path / "run.json").read_text())["visits"]) == 10
    doc = ControlDocument(options(tmp_path, resume=True))
    assert doc.resumed and len(doc.data["visits"]) == 8
    second = FakeRun(options(tmp_path, resume=True), doc, stop_after=None)
    second.visits(None)
    assert second.tuned == 0 and doc.data["window_tokens"]["4"] > 300
    whole = FakeRun(options(tmp_path), ControlDocument(options(tmp_path)), None)
    whole.visits(None)
    assert first.seen[:8] + second.seen == whole.seen
    assert doc.data["cells"] == whole.doc.data["cells"]


def test_another_run_is_not_resumed(tmp_path):
    ControlDocument(options(tmp_path)).write()
    assert not ControlDocument(options(tmp_path)).resumed
    assert not ControlDocument(options(tmp_path, resume=True, seed=1)).resumed
    assert ControlDocument(options(tmp_path, resume=True, max_minutes=1.0)).resumed


def test_the_document_has_what_others_read(tmp_path):
    doc = ControlDocument(options(tmp_path))
    doc.data["visits"] = visits(3)
    doc.write()
    data = json.loads((tmp_path / "run.json").read_text())
    assert set(data["cells"][0]) >= {
        "batch", "domain", "arm", "output_tokens_per_s", "ratio_to_none", "ratio_low",
        "ratio_high", "ratio_to_best", "best_low", "best_high", "cpu_s_per_token",
        "blocks",
    }  # fmt: skip
    assert len(data["cells"]) == 4 * len(RATES)
    assert data["verdict"].startswith("adaspec: best or within noise of the best in 4")
    assert data["left_on_the_table"] == [] and data["options"]["blocks"] == 3


def test_windows_fill_the_minutes_and_are_longer_where_more_is_prefilled(tmp_path):
    chosen = options(tmp_path, batches=(1, 4, 48), minutes=30.0)
    run = FakeRun(chosen, ControlDocument(chosen), None)
    rates = {("none", batch): 40.0 * batch for batch in chosen.sizes}
    run.calibrate(None, chosen.sizes)
    tokens = run._window_tokens({b: rate for (_, b), rate in rates.items()}, 60.0)
    seconds = [tokens[str(batch)] / (40.0 * batch) for batch in chosen.sizes]
    assert seconds[0] < seconds[1] < seconds[2]
    each = chosen.num_visits / len(chosen.sizes)
    spent = sum(each * (1.0 + 1.15 * window) for window in seconds)
    budget = 0.95 * (30 * 60 - chosen.record_s) - 60.0
    assert 0.97 * budget < spent < 1.03 * budget
