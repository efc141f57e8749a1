"""The plan's predictions of quickstart runs, on runs made up by its formulas."""

from __future__ import annotations

import json
import math

import pytest

from scripts.bench import plan_check

BEFORE, AFTER, TAU, RATE, DELAY = 1.5, 2.5, 40_000.0, 2_000.0, 15.0
PLAIN, TOKENS, REQUESTS = 60.0, 96, 64
PREFILL = 0.1


def arm(name: str, cost: float, slower: float = 1.0) -> dict:
    """Requests one after the other, at what their lengths and steps give."""
    now, columns = 0.0, {"index": [], "start_s": [], "end_s": [], "tokens_per_step": []}
    for index in range(REQUESTS):
        length = 1.0 if name == "none" else BEFORE
        if name == "tide" and now >= DELAY:
            length = AFTER - (AFTER - BEFORE) * math.exp(-RATE * now / TAU)
        step = 1.0 if name == "none" else cost
        seconds = TOKENS / PLAIN * (PREFILL + (1 - PREFILL) * step / length) * slower
        row = index, now, now + seconds, length
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
        now += seconds
    lengths = columns["tokens_per_step"]
    mean = REQUESTS / sum(1 / x for x in lengths)
    tpot = (1 - PREFILL) / PLAIN * (1.0 if name == "none" else cost) / mean * slower
    return {
        "requests": columns,
        "output_tokens_per_s_by_phase": {"after_shift": REQUESTS * TOKENS / now},
        "tpot_ms": 1000 * tpot,
        "mean_ttft_s": PREFILL * TOKENS / PLAIN,
        "mean_e2e_s": TOKENS / PLAIN,
        "trainers": [{"train_tokens": RATE * now}],
    }


def report(static: float = 1.2, control: float = 1.1, tide: float = 1.0) -> dict:
    costs = {"none": 1.0, "frozen": static, "no_learning": control, "tide": control}
    stream = {"num_before": 0, "num_after": REQUESTS, "max_tokens": TOKENS}
    return {
        "arms": {
            name: arm(name, cost, tide if name == "tide" else 1.0)
            for name, cost in costs.items()
        },
        "first_swap_after_shift_s": DELAY,
        "environment": {"stream": stream, "commit": "none"},
    }


@pytest.fixture
def check(tmp_path):
    def run(**reports: dict) -> tuple[int, dict]:
        for name, content in reports.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        out = tmp_path / "out.json"
        paths = [str(tmp_path / f"{name}.json") for name in reports]
        code = plan_check.main([*paths, "--json", str(out)])
        return code, json.loads(out.read_text())

    return run


def test_a_run_that_follows_the_formulas_is_foretold(check):
    code, table = check(one=report())
    assert code == 0
    assert {line["arm"] for line in table["lines"]} == {
        *("none", "frozen", "no_learning", "tide")
    }
    for line in table["lines"]:
        assert line["ratio"] == pytest.approx(1, abs=0.02), line
    found = table["inputs"]["one"]
    assert found["length_before"] == pytest.approx(BEFORE)
    assert found["static_step_cost"] == pytest.approx(1.2)
    assert found["length_after"] == pytest.approx(AFTER, abs=0.05)


def test_the_stored_table_is_of_the_three_quickstarts():
    names = [path.name.partition(".")[0] for path in plan_check.parse_args([]).reports]
    assert names == ["quickstart", "quickstart_2", "quickstart_3"]
    stored = json.loads((plan_check.RESULTS / "plan_check.json").read_text())
    assert list(stored["inputs"]) == names
    reports = map(plan_check.read_report, plan_check.STORED)
    now = plan_check.compare(dict(zip(names, reports, strict=True)))
    for line, other in zip(stored["lines"], now, strict=True):
        assert line["measured"] == other["measured"]
        assert line["ratio"] == pytest.approx(other["ratio"], rel=1e-2)


def test_what_was_off_is_named(check, capsys):
    code, table = check(one=report(), two=report(static=1.45))
    assert code == 0  # each foretells itself
    off = [line for line in table["lines"] if "off" in line]
    assert {line["arm"] for line in off} == {"frozen"}
    assert all(line["off"].startswith("static_step_cost") for line in off)
    assert len(off) == 2
    assert "own runs: 8 of 8 within 10%" in capsys.readouterr().out


def test_an_arm_on_a_slower_host_is_off(check):
    code, table = check(one=report(tide=1.3))
    assert code == 1
    (line,) = [line for line in table["lines"] if "off" in line]
    assert line["arm"] == "tide"
    assert line["off"].startswith(plan_check.TIDE_COST)
