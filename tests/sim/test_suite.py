import json

import pytest

from sim.arrivals import synthetic
from sim.published import MODELS
from sim.run import main
from sim.state import Server
from sim.suite import ARMS, Options, run_cells, suite_cells

TRACE = synthetic("fluctuating", 6.0, 4.0, seed=0).clipped(256)


@pytest.fixture(scope="module")
def rows():
    cells = suite_cells("quick", [TRACE])
    return list(run_cells(cells, ARMS, Options()))


def test_rows_are_complete_json(rows):
    text = json.dumps(rows, allow_nan=False)
    assert json.loads(text) == rows
    assert [row["regime"] for row in rows] == ["low", "high", "shifting"]
    for row in rows:
        assert set(row["throughput"]) == set(ARMS)
        assert row["model"] == MODELS[0] and row["trace"] == TRACE.name
        ours = row["throughput"]["adaspec"]
        assert row["regret"] == pytest.approx(1 - ours / row["clairvoyant"])
        tokens = int(TRACE.output.sum())
        assert all(arm["output_tokens"] == tokens for arm in row["arms"].values())
        assert row["arms"]["none"]["drafted"] == 0
        # A step of any static arm drafts its length, no more.
        static = row["arms"]["static3"]
        assert static["verified"] <= static["drafted"]
    low, high = rows[0]["throughput"], rows[1]["throughput"]
    assert min(high["static3"], high["adaspec"]) > high["none"]
    assert low["static7"] < low["adaspec"]


def test_a_truth_changes_acceptance_and_not_plain_decoding(rows):
    cells = suite_cells("quick", [TRACE], regimes=["high"])
    options = Options(truth="plateau")
    [row] = run_cells(cells, ("none", "adaspec"), options)
    assert row["throughput"]["none"] == rows[1]["throughput"]["none"]
    assert row["clairvoyant"] != rows[1]["clairvoyant"]


@pytest.mark.slow  # two processes
def test_processes_give_the_same_rows_and_another_seed_does_not(rows):
    cells = suite_cells("quick", [TRACE], regimes=["low", "high"])
    arms = ("none", "adaspec")
    for row, before in zip(
        run_cells(cells, arms, Options(), processes=2), rows[:2], strict=True
    ):
        assert row["clairvoyant"] == before["clairvoyant"]
        assert all(row["arms"][arm] == before["arms"][arm] for arm in arms)
    other = next(iter(run_cells(cells, arms, Options(seed=1))))
    assert other["throughput"]["adaspec"] != rows[0]["throughput"]["adaspec"]


def test_limit_is_measured():
    cells = suite_cells("quick", [TRACE], regimes=["high"])
    options = Options(server=Server(slo_seconds=0.005))
    row = next(iter(run_cells(cells, ("none", "adaspec"), options)))
    arms = row["arms"]
    assert 0 <= arms["none"]["slo_attainment"] <= 1
    assert arms["adaspec"]["slo_attainment"] >= arms["none"]["slo_attainment"]
    met, missed = row["control"]["slo_met"], row["control"]["slo_missed"]
    assert met + missed == (TRACE.output > 1).sum()


def test_command_reads_traces_and_writes_rows(tmp_path, capsys):
    path = tmp_path / "my.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,5\n0.1,20,9\n")
    base = ["--trace", str(path), "--regime", "high", "--arm", "none"]
    out = tmp_path / "sim.json"
    assert main([*base, "--suite", "quick", "--json", str(out), "--pace", "time"]) == 0
    assert "[1/1] gpt-oss-120b my high" in capsys.readouterr().err
    result = json.loads(out.read_text())
    assert set(result["rows"][0]["throughput"]) == {"none"}
    assert result["options"]["seed"] == 0
    assert main([*base, "--suite", "quick", "--cold", "--table"]) == 0
    assert "| gpt-oss-120b | my | high |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "nosuch"], "unknown suite 'nosuch'; choose from published, quick"),
        (["--trace", "gone.csv"], "cannot read trace gone.csv"),
        (["--arm", "odd", "--seconds", "2"], "unknown arm 'odd'"),
        (["--json", "gone/x.json"], "cannot write"),
        (["--seconds", "0.0001"], "no request to replay"),
    ],
)
def test_bad_input_gives_one_line(arguments, says, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
