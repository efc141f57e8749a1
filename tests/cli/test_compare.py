"""`vllm-tide compare` on files as vLLM and GuideLLM write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vllm_tide.cli.main import main
from vllm_tide.compare import Figure, Served, compare, page, read, read_side, t_975


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


def guidellm_result(speed=1.0, n=20, **changes):
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
        | changes
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


@pytest.fixture
def folder(tmp_path):
    """A folder of results, one for each of some speeds."""

    def write(name, *speeds, write=vllm_result, **changes):
        (tmp_path / name).mkdir()
        for i, speed in enumerate(speeds):
            path = tmp_path / name / f"{i}.json"
            path.write_text(json.dumps(write(speed=speed, **changes)))
        return str(tmp_path / name)

    return write


def test_a_faster_side_is_said_to_be_faster(folder, capsys):
    a, b = folder("now", 1.0, 1.01), folder("tide", 1.25, 1.26)
    assert main(["compare", a, b]) == 0
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    assert first.startswith("tide serves 1.2")
    assert first.endswith("use tide.")
    assert "their prompts as long, on both sides." in said
    assert "Outputs are equal in 80 of 80 requests." in said
    assert " better" in said


def test_a_slower_side_is_not_taken(folder, capsys):
    a, b = folder("now", 1.0, 1.01), folder("tide", 0.8, 0.81)
    assert main(["compare", a, b]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("keep now.")


def test_one_result_of_a_side_tells_nothing_apart(file, folder, capsys):
    a, b = file("now", vllm_result()), file("tide", vllm_result(speed=1.25))
    for other in (b, folder("more", 1.25, 1.26)):
        assert main(["compare", a, other]) == 0
        said = capsys.readouterr().out
        assert " serves 1.2" in said.splitlines()[0]
        assert "cannot tell them apart; give two or more" in said.splitlines()[0]
        assert "better" not in said.split("\n", 1)[1]


def served(seconds, n=64, milliseconds=10.0, acceptance=2.0):
    times = np.full(n, float(milliseconds))
    tokens = np.full(n, 100)
    lengths = (100.0,) * n
    return Served(seconds, tokens, times, times, times, lengths, (), 0, acceptance)


def test_one_server_against_itself_is_rarely_decided():
    """Runs have speeds of their own (5%), so their requests are not independent."""
    rng = np.random.default_rng(0)
    for files in (2, 3):
        decided = 0
        for _ in range(200):
            slow = np.exp(rng.normal(0, 0.05, (2, files)))
            a, b = ([served(80 * x, milliseconds=10 * x) for x in y] for y in slow)
            said = compare(a, b, ("A", "B")).verdict
            decided += "cannot tell them apart" not in said
        assert decided <= 20


@pytest.mark.parametrize(
    ("seconds", "times", "end"),
    [
        ((5.0, 5.1), (12.0, 12.1), "these runs cannot tell them apart."),
        ((20.0, 20.2), (8.0, 8.1), "these runs cannot tell them apart."),
        ((9.0, 13.0), (8.0, 8.1), "these runs cannot tell them apart."),
        ((9.0, 10.5), (8.0, 8.1), "use B."),
        ((9.0, 13.0), (12.0, 12.1), "keep A."),
        ((5.0, 5.1), (9.0, 11.5), "use B."),
    ],
)
def test_time_per_token_does_not_outvote_tokens_per_second(seconds, times, end):
    a = [served(10.0), served(10.2, milliseconds=10.1)]
    pairs = zip(seconds, times, strict=True)
    b = [served(second, milliseconds=time) for second, time in pairs]
    assert compare(a, b, ("A", "B")).verdict.endswith(end)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_concurrency", 64, "max_concurrency (64 and 8)"),
        ("request_rate", 2.0, "request_rate (2.0 and inf)"),
        ("model_id", "other", "model_id (m and other)"),
        ("input_lens", [500] * 40, "mean length of prompts (44 and 500 tokens)"),
        ("errors", ["x", *[""] * 39], "more than 1% of a side's requests failed"),
    ],
)
def test_what_is_not_comparable_has_no_verdict(folder, capsys, field, value, said):
    same = {"max_concurrency": 8, "request_rate": "inf", "model_id": "m"}
    a = folder("now", 1.0, 1.01, **same)
    b = folder("tide", 1.5, 1.51, **same | {field: value})
    for sides in ([a, b], [b, a]):
        assert main(["compare", *sides]) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert "no verdict" in first
        assert said in first
        assert "use " not in first
        assert "keep " not in first


def test_few_failures_are_said_and_do_not_hinder(folder, capsys):
    a = folder("now", 1.0, 1.01, n=200)
    b = folder("tide", 1.5, 1.51, n=200, errors=["x", *[""] * 199])
    assert main(["compare", a, b]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("use tide. 0 and 2 requests failed.")


def test_outputs_are_compared_where_both_sides_served(folder, capsys):
    def errors(at):
        return [f"{'x' * (i == at)}" for i in range(200)]

    a = folder("now", 1.0, 1.01, n=200, errors=errors(3))
    b = folder("tide", 1.5, 1.51, n=200, errors=errors(150))
    assert main(["compare", a, b]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "their prompts as long" in last
    assert "equal in 396 of 396 requests." in last


def test_sides_of_other_numbers_of_files_are_not_said_to_differ(folder, capsys):
    a, b = folder("now", 1.0, 1.01), folder("tide", 1.5, 1.51, 1.52)
    assert main(["compare", a, b]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Requests are not paired, as one side has more files."


def test_half_a_character_is_escaped(folder, tmp_path, capsys):
    a, b = folder("now", 1.0, 1.01), folder("tide", 1.5, 1.51, model_id="\udce9")
    page = tmp_path / "page.html"
    names = ["--names", "\ud800", "B", "--html", str(page)]
    assert main(["compare", a, b, *names]) == 0
    for said in (capsys.readouterr().out, page.read_text()):
        assert "times the tokens/s of \\ud800" in said
        assert "model_id (None and \\udce9)" in said


def test_an_interval_that_says_nothing_has_no_numbers():
    a, b = [served(10.0), served(10.1)], [served(10.0), served(90.0)]
    found = compare(a, b, ("A", "B"))
    assert found.figures[0].high > 1e5
    assert "tokens/s of A [very wide], its" in found.verdict
    assert "<td>very wide</td>" in page(found)


def test_a_zero_leaves_no_interval():
    a = [served(10.0), served(10.2)]
    b = [served(10.0, acceptance=0.0), served(10.1), served(10.2)]
    limits = {"ttft": 50.0}
    figures = compare(a, [*b, served(10, milliseconds=99)], ("A", "B"), limits).figures
    for name, before in (("goodput", 128 / 20.2), ("acceptance length", 2.0)):
        (found,) = [figure for figure in figures if figure.name == name]
        assert found.a == pytest.approx(before, rel=1e-2)
        assert found.ratio == pytest.approx(0.75, rel=1e-2)
        assert (found.low, found.verdict) == (None, 0)


def test_what_was_not_measured_did_not_keep_its_limit(file):
    never = {"time_to_first_token_ms": None, "inter_token_latency_ms": None}
    run = read(Path(file("a", guidellm_result(**never))))
    assert run.goodput({"ttft": 1e9}) == 0
    assert run.goodput({"tpot": 1e9}) == 0
    assert run.goodput({"e2el": 1e9}) == pytest.approx(20 / run.seconds)
    single = read(Path(file("b", guidellm_result(**never, output_tokens=1))))
    assert single.goodput({"tpot": 1.0}) == pytest.approx(20 / run.seconds)


def test_the_same_twice_is_not_told_apart(file, capsys):
    a = [file(f"a{seed}", vllm_result(seed)) for seed in (1, 2)]
    b = [file(f"b{seed}", vllm_result(seed)) for seed in (3, 4)]
    a, b = ",".join(a), ",".join(b)
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
    run = read(Path(file("a", content)))
    assert run.failed == 1
    assert len(run.tokens) == 39
    tpot = 1e3 * sum(content["itls"][0]) / (content["output_lens"][0] - 1)
    assert run.tpot[0] == pytest.approx(tpot)
    assert run.e2el[0] == pytest.approx(
        1e3 * (content["ttfts"][0] + sum(content["itls"][0]))
    )


def test_guidellm_is_read(folder):
    sides = [
        read_side(folder(name, *speeds, write=guidellm_result))
        for name, speeds in (("a", (1.0, 1.01)), ("b", (1.6, 1.616)))
    ]
    found = compare(*sides, ("a", "b"))
    assert found.failed == (2, 2)
    assert found.identical == (40, 40)
    by_name = {figure.name: figure for figure in found.figures}
    assert by_name["latency, median"].ratio == pytest.approx(1 / 1.6)
    assert by_name["TPOT, median"].verdict == 1


def test_guidellm_s_requests_are_paired_in_the_order_of_their_starts(file):
    content = guidellm_result(speed=1.6)
    rows = content["benchmarks"][0]["requests"]["successful"]
    for i, row in enumerate(rows):
        row["output"] = f"text {i}"
    one = read(Path(file("one", content)))
    rows.reverse()
    other = read(Path(file("other", content)))
    assert compare([one], [other], ("a", "b")).identical == (20, 20)


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
        (vllm_result(spec_decode_acceptance_length="two"), "acceptance_length: 'two'"),
        (vllm_result(spec_decode_acceptance_length=[1]), "acceptance_length: [1] is"),
        (vllm_result(output_lens=[10**400] * 40), "output_lens: 1000"),
        (vllm_result(input_lens=[-1] * 40), "input_lens: -1 is"),
        (vllm_result(ttfts=[float("inf")] * 40), "ttfts: inf is"),
        (vllm_result(itls=[[float("nan")]] * 40), "itls: nan is"),
        (vllm_result(itls=[[1e308, 1e308]] * 40), "has no times of its requests"),
        (vllm_result(duration=float("inf")), "duration: inf is"),
        (vllm_result(duration=-3), "duration: -3 is"),
        (vllm_result(duration=0), "duration: 0 is"),
        (vllm_result(generated_texts=["x"]), "generated_texts: 1 of 40"),
        (guidellm_result(output_tokens=10**400), "output_tokens: 1000"),
        (guidellm_result(request_latency=float("nan")), "request_latency: nan is"),
        (guidellm_result(request_end_time=None), "duration: nan is"),
        ({"benchmarks": []}, "has 0 benchmarks"),
        ({"benchmarks": guidellm_result()["benchmarks"] * 2}, "has 2 benchmarks"),
        ({"benchmarks": [{"requests": {"successful": []}}]}, "no request in it was"),
    ],
)
def test_a_wrong_file_is_one_sentence(file, capsys, content, sentence):
    good, bad = file("good", vllm_result()), file("bad", content)
    assert main(["compare", good, bad]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {bad}: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_json_of_great_depth_is_one_sentence(file, tmp_path, capsys):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert main(["compare", file("good", vllm_result()), str(deep)]) == 2
    assert f"{deep}: cannot be read as JSON" in capsys.readouterr().err


def test_a_run_counts_once(file, tmp_path, capsys):
    good, other = file("good", vllm_result()), file("other", vllm_result(1))
    copy = file("copy", vllm_result())
    for side in (f"{good},{good}", f"{other},{good},{copy}", f"{tmp_path},{other}"):
        assert main(["compare", other, side]) == 2
        assert "the same run is there twice" in capsys.readouterr().err
    assert main(["compare", f"{good},{other}", f"{other},{good}"]) == 0


def test_wrong_arguments(file, tmp_path, capsys):
    good = file("good", vllm_result())
    for arguments in (
        [good, str(tmp_path / "none.json")],
        [good, ","],
        [good, good, "--goodput", "tpot"],
        [good, good, "--goodput", "ttft:²"],
        [good, good, "--goodput", "ttft:."],
        [good, good, "--json", str(tmp_path / "no" / "x.json")],
    ):
        assert main(["compare", *arguments]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_what_cannot_be_written_is_named(file, tmp_path, capsys, option):
    good = file("good", vllm_result())
    written = ["--html", str(tmp_path / "page.html")] if option == "--json" else []
    assert main(["compare", good, good, *written, option, "/dev/full"]) == 2
    assert capsys.readouterr().err.startswith("error: /dev/full: No space left")


def test_what_is_not_sure_is_neither():
    figure = Figure("x", "ms", 1.0, 2.0, 2.0, 0.9, 3.0, "lower")
    assert figure.verdict == 0
    assert t_975(3) == pytest.approx(3.1824)
    assert t_975(30) == pytest.approx(2.0423, abs=1e-3)
