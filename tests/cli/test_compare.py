"""`vllm-tide compare` on files as `vllm bench serve` writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from vllm_tide.cli.main import main
from vllm_tide.compare import RATE, TPOT, Run, compare, read


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


@pytest.fixture
def folder(tmp_path):
    """Make a folder of results, one for each of some speeds."""

    def write(name, *speeds, seeds=None, **changes):
        (tmp_path / name).mkdir()
        for i, speed in enumerate(speeds):
            content = vllm_result(seeds[i] if seeds else 0, speed, **changes)
            (tmp_path / name / f"{i}.json").write_text(json.dumps(content))
        return str(tmp_path / name)

    return write


def compared(capsys, *sides, status=0):
    """Return the first line and the remaining output of the command."""
    assert main(["compare", *sides]) == status
    first, text = capsys.readouterr().out.split("\n", 1)
    return first, text


def test_a_faster_side_is_chosen_and_a_slower_one_is_not(folder, tmp_path, capsys):
    a = folder("now", 1.0, 1.01, spec_decode_acceptance_length=2.0)
    b = folder("tide", 1.25, 1.26, spec_decode_acceptance_length=2.6)
    out = tmp_path / "out.json"
    first, text = compared(capsys, a, b)
    assert main(["compare", a, b, "--json", "--output", str(out)]) == 0
    assert first.startswith("tide serves 1.2") and first.endswith("use tide.")
    assert "Outputs are equal in 80 of 80 requests." in text
    assert " better" in text
    figures = {f["name"]: f for f in json.loads(out.read_text())["figures"]}
    assert figures["acceptance length"]["ratio"] == pytest.approx(1.3)
    rate = figures[RATE]
    assert rate["low"] < rate["ratio"] < rate["high"]
    assert rate["ratio"] == pytest.approx(1.25, abs=0.05)
    assert (rate["verdict"], figures[TPOT]["verdict"]) == (1, 1)
    assert compared(capsys, b, a)[0].endswith("keep tide.")


def run_of(seconds, milliseconds=10.0):
    figures = {RATE: 6400 / seconds, TPOT: milliseconds}
    settings = dict.fromkeys(("model_id", "request_rate", "max_concurrency"), "None")
    return Run(figures, {}, 100.0, 64, 0, settings)


def test_one_server_compared_with_itself_is_rarely_decided():
    """Speeds of runs vary by 5%; the requests of a run are not independent."""
    rng = np.random.default_rng(0)
    for files in (2, 3):
        decided = 0
        for _ in range(200):
            slow = np.exp(rng.normal(0, 0.05, (2, files)))
            a, b = ([run_of(80 * x, 10 * x) for x in side] for side in slow)
            verdict = compare(a, b, ("A", "B"))["verdict"]
            decided += "these runs are inconclusive" not in verdict
        assert decided <= 20


def test_the_interval_is_welchs():
    stats = pytest.importorskip("scipy.stats")
    a, b = [10.0, 10.4, 11.0], [8.0, 9.1, 8.4]
    figure = compare(list(map(run_of, a)), list(map(run_of, b)), ("A", "B"))["figures"]
    logs = np.log(1 / np.array(b)), np.log(1 / np.array(a))
    test = stats.ttest_ind(*logs, equal_var=False)
    interval = test.confidence_interval(0.95)
    assert figure[0]["ratio"] == pytest.approx(
        math.exp(logs[0].mean() - logs[1].mean())
    )
    # Degrees of freedom are rounded down: the interval is a little wider.
    assert figure[0]["low"] == pytest.approx(math.exp(interval.low), rel=0.03)
    assert figure[0]["low"] < math.exp(interval.low)
    assert figure[0]["high"] > math.exp(interval.high)


@pytest.mark.parametrize(
    ("seconds", "times", "end"),
    [
        ((5.0, 5.1), (12.0, 12.1), "these runs are inconclusive."),
        ((20.0, 20.2), (8.0, 8.1), "these runs are inconclusive."),
        ((9.0, 13.0), (8.0, 8.1), "these runs are inconclusive."),
        ((9.0, 10.5), (8.0, 8.1), "use B."),
        ((9.0, 13.0), (12.0, 12.1), "keep A."),
        ((5.0, 5.1), (9.0, 11.5), "use B."),
    ],
)
def test_time_per_token_does_not_outvote_tokens_per_second(seconds, times, end):
    a = [run_of(10.0), run_of(10.2, 10.1)]
    b = list(map(run_of, seconds, times))
    assert compare(a, b, ("A", "B"))["verdict"].endswith(end)


def test_measurements_against_the_verdict_are_in_its_message(folder, capsys):
    a, b = folder("now", 1.0, 1.01), folder("tide", 1.25, 1.26)
    for path in Path(b).iterdir():
        content = json.loads(path.read_text())
        content["ttfts"] = [2.45 * t for t in content["ttfts"]]
        path.write_text(json.dumps(content))
    first, _ = compared(capsys, a, b)
    assert "use tide. But TTFT, median (ms) is worse: 2.45 times." in first


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("max_concurrency", 64, "max_concurrency (64 and 8)"),
        ("request_rate", 2.0, "request_rate (2.0 and inf)"),
        ("model_id", "\udce9", "model_id (m and \\udce9)"),
        ("input_lens", [500] * 40, "mean length of prompts (44 and 500 tokens)"),
        ("errors", ["x", *[""] * 39], "more than 1% of a side's requests failed"),
    ],
)
def test_incomparable_results_have_no_verdict(folder, capsys, field, value, part):
    same = {"max_concurrency": 8, "request_rate": "inf", "model_id": "m"}
    a = folder("now", 1.0, 1.01, **same)
    b = folder("tide", 1.5, 1.51, **same | {field: value})
    for sides in ([a, b], [b, a]):
        first, _ = compared(capsys, *sides)
        assert "no verdict" in first
        assert part in first
        assert "use " not in first and "keep " not in first


def test_outputs_are_compared_for_requests_of_both_sides(folder, capsys):
    def errors(at):
        return [f"{'x' * (i == at)}" for i in range(200)]

    texts = [f"text {i}" for i in range(200)]
    a = folder("now", 1.0, 1.01, n=200, errors=errors(3), generated_texts=texts)
    texts = ["another", *texts[1:]]
    b = folder("tide", 1.5, 1.51, n=200, errors=errors(150), generated_texts=texts)
    first, text = compared(capsys, a, b)
    assert first.endswith("use tide. 2 and 2 requests failed.")
    assert "Outputs are equal in 394 of 396 requests." in text


def test_figures_are_vllms_own(tmp_path):
    content = vllm_result(errors=["", "broken", *[""] * 38])
    content["itls"] = content["itls"][:1] * 40
    content["output_lens"] = content["output_lens"][:1] * 40
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    run = read(path)
    assert (run.served, run.failed) == (39, 1)
    tpot = 1e3 * sum(content["itls"][0]) / (content["output_lens"][0] - 1)
    assert run.figures[TPOT] == pytest.approx(tpot)
    tokens = 39 * content["output_lens"][0]
    assert run.figures[RATE] == pytest.approx(tokens / content["duration"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"duration": 3.0, "completed": 1}, "--save-detailed"),
        ([1, 2], "has no times of its requests"),
        (vllm_result(errors=["x"] * 40), "no request was served"),
        (vllm_result(spec_decode_acceptance_length="two"), "acceptance_length: 'two'"),
        (vllm_result(output_lens=[10**400] * 40), "output_lens: 1000"),
        (vllm_result(input_lens=[-1] * 40), "input_lens: -1 is"),
        (vllm_result(itls=[[float("nan")]] * 40), "itls: nan is"),
        (vllm_result(itls=[[1e308, 1e308]] * 40), "has no times of its requests"),
        (vllm_result(duration=0), "duration: 0 is"),
        (vllm_result(generated_texts=["x"]), "has no times of its requests"),
    ],
)
def test_a_wrong_file_gives_one_line(folder, tmp_path, capsys, content, sentence):
    good, bad = folder("good", 1.0), tmp_path / "bad.json"
    bad.write_text(json.dumps(content))
    assert main(["compare", good, str(bad)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {bad}: ")
    assert sentence in message
    assert message.count("\n") == 1


def test_wrong_arguments(folder, tmp_path, capsys):
    good = folder("good", 1.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "deep.json").write_text("[" * 100_000)
    twice = folder("twice", 1.0, 1.0)
    for arguments, part in (
        ([str(tmp_path / "none.json")], "cannot be read as JSON (No such file"),
        ([str(tmp_path / "deep.json")], "cannot be read as JSON"),
        ([str(tmp_path / "empty")], "contains no JSON file"),
        ([twice], "1.json: duplicate of another run; give it once."),
        ([good, "--output", "/dev/full"], "/dev/full: No space left"),
    ):
        assert main(["compare", good, *arguments]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and part in message
