"""`vllm-tide compare` on files as vLLM and GuideLLM write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vllm_tide.cli.main import main
from vllm_tide.compare import Figure, compare, read, read_side, t_975


def vllm_result(seed=0, speed=1.0, n=40, **changes):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 90, n)
    gaps = [(0.02 / speed * rng.uniform(0.8, 1.2, k - 1)).tolist() for k in lengths]
    first = rng.uniform(0.1, 0.2, n)
    latest = float(max(t + sum(g) for t, g in zip(first, gaps, strict=True)))
    return {
        "duration": latest,
        "completed": n,
        "input_lens": rng.integers(30, 60, n).tolist(),
        "output_lens": lengths.tolist(),
        "ttfts": first.tolist(),
        "itls": gaps,
        "generated_texts": [f"text {i}" for i in range(n)],
        "errors": [""] * n,
    } | changes


def guidellm_result(speed=1.0, n=20):
    rows = [
        {
            "request_start_time": 100.0 + 0.1 * i,
            "request_end_time": 100.0 + 0.1 * i + 2.0 / speed,
            "request_latency": 2.0 / speed,
            "prompt_tokens": 50 + i,
            "output_tokens": 100,
            "time_to_first_token_ms": 90.0,
            "inter_token_latency_ms": (2000.0 / speed - 90.0) / 99,
            "output": "x",
        }
        for i in range(n)
    ]
    requests = {"successful": rows, "errored": [{}], "incomplete": []}
    return {"metadata": {}, "benchmarks": [{"requests": requests}]}


@pytest.fixture
def file(tmp_path):
    def write(name, content):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        return str(path)

    return write


def test_a_faster_side_is_said_to_be_faster(file, capsys):
    a, b = file("now", vllm_result()), file("tide", vllm_result(speed=1.25))
    assert main(["compare", a, b]) == 0
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    assert first.startswith("tide serves 1.2")
    assert first.endswith("use tide.")
    assert "Requests are the same on both sides." in said
    assert "Outputs are equal in 40 of 40 requests." in said
    assert "Give two or more files" in said


def test_a_slower_side_is_not_taken(file, capsys):
    a, b = file("now", vllm_result()), file("tide", vllm_result(speed=0.8))
    assert main(["compare", a, b]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("keep now.")


def test_the_same_twice_is_not_told_apart(file, capsys):
    a, b = file("a", vllm_result(1)), file("b", vllm_result(2))
    assert main(["compare", a, b]) == 0
    said = capsys.readouterr().out
    assert "these runs cannot tell them apart" in said.splitlines()[0]
    assert "Requests differ" in said


def test_several_files_give_an_interval(tmp_path):
    for side, speed in (("a", 1.0), ("b", 1.3)):
        (tmp_path / side).mkdir()
        for seed in range(3):
            path = tmp_path / side / f"{seed}.json"
            path.write_text(json.dumps(vllm_result(seed, speed)))
    sides = [read_side(str(tmp_path / side)) for side in "ab"]
    rate = compare(*sides, ("a", "b")).figures[0]
    assert rate.low < rate.ratio < rate.high
    assert rate.ratio == pytest.approx(1.28, abs=0.04)
    files = ",".join(str(tmp_path / "a" / f"{seed}.json") for seed in range(3))
    assert len(read_side(files)) == 3


def test_figures_are_vllm_s_own(file):
    content = vllm_result(errors=["", "broken", *[""] * 38])
    (run,) = read(Path(file("a", content)))
    assert run.failed == 1
    assert len(run.tokens) == 39
    tpot = 1e3 * sum(content["itls"][0]) / (content["output_lens"][0] - 1)
    assert run.tpot[0] == pytest.approx(tpot)
    assert run.e2el[0] == pytest.approx(
        1e3 * (content["ttfts"][0] + sum(content["itls"][0]))
    )


def test_guidellm_is_read(file):
    sides = [
        read_side(file(name, guidellm_result(speed)))
        for name, speed in (("a", 1.0), ("b", 1.6))
    ]
    found = compare(*sides, ("a", "b"))
    assert found.failed == (1, 1)
    assert found.identical == (20, 20)
    by_name = {figure.name: figure for figure in found.figures}
    assert by_name["latency, median"].ratio == pytest.approx(1 / 1.6)
    assert by_name["TPOT, median"].verdict == 1


def test_goodput_and_acceptance(file, tmp_path, capsys):
    lengths = {"spec_decode_acceptance_length": 2.0}
    a = file("a", vllm_result(**lengths))
    b = file("b", vllm_result(speed=1.3, spec_decode_acceptance_length=2.6))
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    limits = ["--goodput", "ttft:500", "tpot:18"]
    written = ["--json", str(out), "--html", str(html)]
    assert main(["compare", a, b, *limits, *written, "--names", "now", "<new>"]) == 0
    assert "goodput" in capsys.readouterr().out
    figures = {f["name"]: f for f in json.loads(out.read_text())["figures"]}
    assert figures["acceptance length"]["ratio"] == pytest.approx(1.3)
    assert figures["goodput"]["b"] > figures["goodput"]["a"]
    page = html.read_text()
    assert "&lt;new&gt;" in page
    assert "<new>" not in page
    assert page.count("<tr") == len(figures) + 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"duration": 3.0, "completed": 1}, "--save-detailed"),
        ([1, 2], "has no times of its requests"),
        (vllm_result(errors=["x"] * 40), "no request in it was served"),
    ],
)
def test_a_wrong_file_is_one_sentence(file, capsys, content, sentence):
    good, bad = file("good", vllm_result()), file("bad", content)
    assert main(["compare", good, bad]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_wrong_arguments(file, tmp_path, capsys):
    good = file("good", vllm_result())
    for arguments in (
        [good, str(tmp_path / "none.json")],
        [good, ","],
        [good, good, "--goodput", "tpot"],
        [good, good, "--json", str(tmp_path / "no" / "x.json")],
    ):
        assert main(["compare", *arguments]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_what_is_not_sure_is_neither():
    figure = Figure("x", "ms", 1.0, 2.0, 2.0, 0.9, 3.0, "lower")
    assert figure.verdict == 0
    assert t_975(3) == pytest.approx(3.1824)
    assert t_975(30) == pytest.approx(2.0423, abs=1e-3)
