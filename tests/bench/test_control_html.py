import re

import pytest

import bench.report
import bench.run
from tests.bench.control_report import control_report, old_cells, report

pytest.importorskip("matplotlib")


def written(tmp_path, data):
    import json

    source, out = tmp_path / "run.json", tmp_path / "sub" / "run.html"
    source.write_text(json.dumps(data))
    assert bench.report.main([str(source), "--out", str(out)]) == 0
    return out.read_text()


def test_a_report_is_one_file_with_its_plots_inside(tmp_path):
    text = written(tmp_path, report())
    # Trace speed-ups; two lengths over time; attainment.
    assert text.count("<svg") == 4
    assert not re.search(r"(?:src|href)=\"https?:", text)
    assert "SLO attainment" in text and "1.500" in text
    assert "adaspec, given the limit" in text
    assert "1 to 2: 3, 3 to 48: 0" in text


def test_controls_page_says_the_verdict_first_and_shows_where_it_is_beaten(tmp_path):
    text = written(tmp_path, control_report())
    places = [
        text.index(part)
        for part in (
            "best or within noise of the best in 4 of 4 cells",
            "scripts/bench/run.py --suite control, complete",
            "3 draft tokens</th>",
            'title="1.000 to 1.000"><b>1.000</b>',
            "differs from the first by at most 2.0%",
            "What was left on the table",
            "lost to, prediction",
            "<details><summary>All figures",
            "<details><summary>Raw JSON",
            "ratio_to_best",
        )
    ]
    assert places == sorted(places)
    assert "vllm_tide&#39;s control" in text and "hsl(0 70% 82%)" in text


def test_an_old_report_of_control_is_still_shown(tmp_path):
    text = written(tmp_path, report() | {"suite": "control", "cells": old_cells()})
    assert "90m: adaspec: best or within noise of the best in 4 of 4 cells" in text


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


def test_a_suite_that_learns_has_a_report_too(tmp_path):
    windows = {"t_s": [1.0, 2.0], "swaps": [0.0, 1.0], "output_tokens_per_s": [9, 8]}
    windows["acceptance_length"] = [None, 1.5]
    arm = {"windows": windows, "segments": [{"start_s": 0.0}, {"start_s": 1.5}]}
    trial = {"plant": "<nan>", "requests_until": 0}
    results = {"arms": {"none": arm, "always@16": arm}, "trials": [trial], "goals": {}}
    data = {"suite": "rollback", "environment": {}, "results": results}
    text = written(tmp_path, data)
    assert text.count("<svg") == 1 and "<nan>" not in text
    for part in ("no speculation", "requests apart 16", "<th>requests until</th>"):
        assert part in text, part


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "No such file"),
        ("x.json", b"\xff{", "is not JSON"),
        ("x.json", b"[" * 9**6, "is not JSON"),
        ("x.json.xz", b"{}", "is not JSON"),
        ("x.json", b'{"arms": {}}', "bench/run.py --json"),
        ("x.json", b'{"cells": [{}], "environment": {}}', "bench/run.py --json"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, name, content, message):
    source, out = tmp_path / name, str(tmp_path / "x.html")
    if content is not None:
        source.write_bytes(content)
    assert bench.report.main([str(source), "--out", out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error and error.count(name) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "x"], "--suite is one of"),
        (["--suite", "control", "--arms", "nope"], "no arm 'nope'"),
        (["--suite", "control", "--target", "/nonexistent"], "--target"),
        (["--suite", "control", "--venv", "/nonexistent"], "--venv"),
        (["--suite", "traces", "--repeats", "0"], "--repeats"),
        (["--suite", "control", "--blocks", "-1"], "--blocks"),
        (["--suite", "control", "--arms", "adaspec"], "needs none and another"),
        (["--suite", "control", "--output-tokens", "9999"], "--max-model-len"),
        (["--suite", "control", "--max-num-seqs", "2"], "--max-num-seqs"),
        (["--suite", "traces", "--keep", "2"], "--keep"),
        (["--suite", "traces", "--traces", "a@b"], "is not NAME or NAME@SECONDS"),
        (["--suite", "multi", "--stall-s", "-1"], "--stall-s and --window-s"),
        (["--suite", "rollback", "--trial-requests", "3"], "is at least 4"),
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
    command = ["--json", str(path), "--venv", str(tmp_path / "venv")]
    assert bench.run.main([*command, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not path.exists()
