import re

import pytest

from tests.bench.control_report import report
from vllm_tide.cli.main import main

pytest.importorskip("matplotlib")


def written(tmp_path, data):
    import json

    source, out = tmp_path / "run.json", tmp_path / "sub" / "run.html"
    source.write_text(json.dumps(data))
    assert main(["bench", "report", str(source), "--out", str(out)]) == 0
    return out.read_text()


def test_a_report_is_one_file_with_its_plots_inside(tmp_path):
    text = written(tmp_path, report())
    # Sweep; trace speed-ups; two lengths over time; attainment.
    assert text.count("<svg") == 5
    assert not re.search(r"(?:src|href)=\"https?:", text)
    assert "SLO attainment" in text and "1.500" in text
    assert "adaspec, given the limit" in text
    assert "1 to 2: 3, 3 to 48: 0" in text


def test_text_of_the_run_is_escaped(tmp_path):
    text = written(tmp_path, report())
    assert "<b>static1</b>" not in text and "&lt;b&gt;static1" in text


def test_a_run_that_was_cut_short_has_a_report_too(tmp_path):
    data = report() | {"cells": [], "complete": False, "stopped": "interrupted"}
    text = written(tmp_path, data)
    assert "NOT complete: interrupted" in text
    data = report()
    data["cells"] = [c for c in data["cells"] if c["arm"] == "static1"]
    assert "static1" in written(tmp_path, data)


def test_bad_input_gets_one_sentence(tmp_path, capsys):
    out = str(tmp_path / "x.html")
    assert main(["bench", "report", str(tmp_path / "none.json"), "--out", out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "x"], "--suite is one of"),
        (["--suite", "control", "--arms", "nope"], "no arm 'nope'"),
        (["--suite", "control", "--target", "/nonexistent"], "--target"),
        (["--suite", "control", "--venv", "/nonexistent"], "--venv"),
        (["--suite", "control", "--repeats", "0"], "--repeats"),
        (["--suite", "control", "--output-tokens", "9999"], "--max-model-len"),
        (["--suite", "control", "--max-num-seqs", "2"], "--max-num-seqs"),
        (["--suite", "traces", "--keep", "2"], "--keep"),
        (["--suite", "traces", "--trace-dir", "/nonexistent"], "--trace-dir"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_it_starts(
    tmp_path, capsys, monkeypatch, arguments, message
):
    vllm = tmp_path / "venv" / "bin" / "vllm"
    vllm.parent.mkdir(parents=True)
    vllm.touch()
    path = tmp_path / "run.json"
    command = ["bench", "run", "--json", str(path), "--venv", str(tmp_path / "venv")]
    assert main([*command, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not path.exists()
