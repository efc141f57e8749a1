"""Interleaved engines, and the rows of their run."""

import math
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.harness.arms import make_arm, speculative_config
from bench.harness.blocks import over_cells
from bench.harness.models import DEMO
from bench.harness.server import ServerOptions, environment
from bench.harness.time_slices import Engine, TimeSlice
from bench.suites import control
from bench.suites.control import AGAIN, OFF
from tests.bench.fake_processes import until

SPEED = {"none": 100.0, AGAIN: 100.0, OFF: 99.0, "static1": 120.0, "static3": 90.0}
MOOD = 0.5  # a host with a speed that halves and doubles


class Toy:
    """An engine of known speed on a host of changing speed."""

    made: list["Toy"]

    def __init__(self, model, config, arguments, env, log):
        self.name, self.config, self.batch, self.number = log.stem, config, 0, 0
        Toy.made.append(self)

    def begin(self, prompts, batch, tokens, salt):
        assert len(prompts) == 64 * batch
        assert max(map(len, prompts)) <= 128
        self.batch, self.number = batch, 0

    def run_slice(self, seconds):
        self.number += 1
        pace = math.exp(MOOD * math.sin(self.number)) * SPEED[self.name]
        finished = (self.number, 7 if self.name != OFF or self.number != 30 else 8)
        return TimeSlice(10, 5, 10 / pace, 0.1, (finished,))

    def close(self):
        if self in Toy.made:
            Toy.made.remove(self)


def measured(arms, *argv):
    given = ["--model", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    given += ["--minutes", "1e-9", "--domains", "home", "--arms", arms]
    options = control.parser_of().parse_args([*given, *argv])
    return control.measure(control.checked(options))


@pytest.fixture
def report(monkeypatch, tmp_path):
    Toy.made = []
    monkeypatch.setattr(control, "Engine", Toy)
    argv = ["--batches", "2,4", "--learns", "20", "--json", str(tmp_path / "F")]
    return measured("none,again,off", *argv)


def test_the_host_speed_cancels_out_of_ratios(report):
    assert not Toy.made, "all of them have ended"
    cells = {(row["requests"], row["arm"]): row for row in report["cells"]}
    assert cells.keys() == {(b, a) for b in (2, 4) for a in ("none", AGAIN, OFF)}
    for batch in (2, 4):
        off, again = cells[batch, OFF], cells[batch, AGAIN]
        assert off["ratio_to_none"] == pytest.approx(0.99, abs=1e-3)
        assert off["low"] <= off["ratio_to_none"] <= off["high"]
        assert again["ratio_to_none"] == pytest.approx(1.0, abs=1e-3)
        assert off["blocks"] == 2 * 2
    # Of 36 time slices of a first visit and 19 of a second one, of two batch sizes.
    assert report["identity"] == {"compared": 2 * (36 + 19), "differing": 2}
    rows = {row["arm"]: row for row in report["overall"]}
    assert rows.keys() == SPEED.keys() & {"none", AGAIN, OFF}
    off = rows[OFF]
    assert rows["none"]["ratio_to_none"] == 1.0
    assert off["low"] <= off["ratio_to_none"] <= off["high"]
    assert off["ratio_to_none"] == pytest.approx(0.99, abs=1e-3)


def test_an_interval_over_cells():
    """Two cells of three blocks each: means 0.2 and 0.1, variance 0.01 in both."""
    logs = {2: (0.1, 0.2, 0.3), 4: (0.0, 0.1, 0.2)}
    visits = [
        {"batch": batch, "domain": "d", "arm": arm, "block": block,
         "output_tokens_per_s": math.exp(log if arm == "a" else 0.0)}
        for batch, result in logs.items()
        for block, log in enumerate(result)
        for arm in ("a", "none")
    ]  # fmt: skip
    half = 2.776 * math.sqrt(2 * 0.01 / 3) / 2  # Student's t, 4 degrees of freedom
    expected = [math.exp(x) for x in (0.15, 0.15 - half, 0.15 + half)]
    assert over_cells(visits, "a", "none") == pytest.approx(expected, rel=1e-3)
    apart = [{**v, "batch": 8, "block": v["arm"] == "a"} for v in visits[:2]]
    assert over_cells(visits + apart, "a", "none") == pytest.approx(expected, rel=1e-3)
    none, *ends = over_cells([v for v in visits if not v["block"]], "a", "none")
    assert none == pytest.approx(math.exp(0.05)) and ends == [None, None]


def test_vllms_schedule_is_tuned_by_the_static_arms(monkeypatch):
    Toy.made = []
    monkeypatch.setattr(control, "Engine", Toy)
    monkeypatch.setitem(SPEED, "vllm_dynamic", 119.0)
    arms = "vllm_dynamic,none,static1,static3"
    result = measured(arms, "--batches", "2,4", "--learns", "20")
    assert list(result["schedules"].values()) == [[(1, 4, 1)]]
    # Tuning slices are in no cell: every arm has as many blocks.
    assert {row["blocks"] for row in result["cells"]} == {2 * 2}
    [row] = [row for row in result["overall"] if row["arm"] == "vllm_dynamic"]
    assert row["ratio_to_none"] == pytest.approx(1.19, abs=1e-3)


def test_a_cold_start_is_a_new_engine_of_each_visit(monkeypatch):
    Toy.made, began = [], []
    monkeypatch.setattr(control, "Engine", Toy)
    monkeypatch.setitem(SPEED, "adaspec", 110.0)
    keep = Toy.__init__

    def watch(self, model, config, arguments, env, log):
        keep(self, model, config, arguments, env, log)
        began.append((self.name, env.get("XDG_CACHE_HOME")))

    monkeypatch.setattr(Toy, "__init__", watch)
    argv = ["--batches", "2", "--visits", "3", "--cold"]
    result = measured("none,adaspec", *argv)
    assert [name for name, _ in began] == ["none", *["adaspec"] * 3]
    caches = [cache for _, cache in began]
    assert None not in caches and len(set(caches)) == 4, "separate profiles"
    assert len(result["visits"]) == 2 * 3 * 2, "no visit is left out"
    assert not Toy.made


def engine(tmp_path, name):
    own = tmp_path / name
    own.mkdir(mode=0o700)
    cpu = min(os.sched_getaffinity(0))
    options = ServerOptions(
        venv=Path(sys.prefix),
        model=DEMO / "target",
        log_path=tmp_path / f"{name}.log",
        engine_cpus=(cpu,),
        kv_cache_bytes=128 << 20,
    )
    argv = ["--max-model-len", "256", "--max-num-seqs", "2", "--dtype", "float32"]
    argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20)]
    config = speculative_config(make_arm(name), DEMO / "draft", own)
    env = environment(options)
    return Engine(options.model, config, argv, env, options.log_path)


def finishing(one, count):
    """Return time slices in which so many requests end."""
    slices = []
    while sum(len(time_slice.finished) for time_slice in slices) < count:
        slices.append(one.run_slice(0.2))
    return slices


def state_of(one):
    facts = Path(f"/proc/{one._process.pid}/stat").read_text()
    return facts.rpartition(")")[2].split()[0]


@pytest.mark.vllm
@pytest.mark.nightly
def test_real_engines_alternate_and_give_equal_outputs(tmp_path):
    prompts = [[5 + i, 6, 7, 8 + i] * 8 for i in range(9)]
    with ExitStack() as stack:
        outputs = {}
        for name in ("none", "static1"):
            one = engine(tmp_path, name)
            stack.callback(one.close)
            one.begin(prompts, 2, 12, "first")
            slices = finishing(one, 4)
            assert all(
                time_slice.seconds >= 0.2 and time_slice.steps for time_slice in slices
            )
            assert all(time_slice.cpu_s > 0 for time_slice in slices)
            until(lambda one=one: state_of(one) == "T")
            outputs[name] = dict(
                pair for time_slice in slices for pair in time_slice.finished
            )
        both = outputs["none"].keys() & outputs["static1"].keys()
        assert len(both) > 2
        assert [outputs["none"][i] for i in both] == [
            outputs["static1"][i] for i in both
        ]
        # Open requests are dropped, and numbers begin at 0.
        one.begin(prompts[::-1], 1, 3, "second")
        again = finishing(one, 1)[-1].finished
        assert again[0][0] == 0 and again[0] != (0, outputs["static1"][0])
        with pytest.raises(
            RuntimeError, match="an engine failed: .*; .*static1.* ends with"
        ):
            one.begin([], 1, 3, "third")
