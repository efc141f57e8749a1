"""Does `vllm-tide plan` foretell our own runs?

Takes what the planner asks for from one run of `scripts/quickstart.sh --json FILE` and
predicts tokens/s after the shift of every arm of every run, its own too::

    python scripts/bench/plan_check.py [REPORT ...] [--json FILE]

Without a report it reads the three that are stored.
A core serves, another trains. From a report: tokens/s without speculation; prefill's
share of a request's time; a verify step's time over a plain one's (time per output
token times tokens per step), static and under control; tokens per step of the draft
that is never trained; trained tokens per second; seconds to the first deployment; and
from tokens per step against trained tokens where the curve ends and how fast it gets
there. TIDE's tokens/s is no input: a prediction of the own run tests the formulas, one
of of another run also how much runs differ. Where one is off by more than 10% it says
which input, taken from the predicted run, would mend it most. A candidate is also the
time of a step of TIDE's own arm: arms run one after the other on a host that changes.
As in the planner a step counts as no shorter than a plain one. Exit status 1: a
prediction of the own run is off by more than that.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from vllm_tide.plan.cluster import Cluster, fit_curve, read_cluster  # noqa: E402
from vllm_tide.plan.throughput import Case  # noqa: E402

RESULTS = Path(__file__).parent / "results"
STORED = [RESULTS / f"quickstart{n}.json.xz" for n in ("", "_2", "_3")]
WITHIN = 0.1
BLOCK = 8
"""Requests that give one point of the curve."""
TIDE_COST = "step_cost of TIDE's arm"  # no input: it may be what was off
CURVE = "length_after", "tokens_to_63_percent"
Inputs = dict[str, float]


def read_report(path: Path) -> dict[str, Any]:
    """A report of the quickstart, compressed or not."""
    data = path.read_bytes()
    return json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)


def after_shift(arm: dict[str, Any], first: int) -> list[tuple[float, float, float]]:
    """Start, end (s) and tokens per step of requests from number `first` on."""
    columns = arm["requests"]
    names = "index", "start_s", "end_s", "tokens_per_step"
    rows = zip(*(columns[name] for name in names), strict=True)
    return [row[1:] for row in rows if row[0] >= first]


def steps_length(requests: Sequence[tuple[float, float, float]]) -> float:
    """Tokens per step of requests of the same length."""
    return harmonic_mean([one[2] for one in requests])


def inputs_of(report: dict[str, Any]) -> Inputs:
    """What the planner asks for, of one run."""
    arms, first = report["arms"], report["environment"]["stream"]["num_before"]
    none, tide = arms["none"], arms["tide"]
    rows = {name: after_shift(arm, first) for name, arm in arms.items()}
    length = {name: steps_length(rows[name]) for name in ("frozen", "no_learning")}
    cost = {
        name: arm["tpot_ms"] * steps_length(after_shift(arm, 0)) / none["tpot_ms"]
        for name, arm in arms.items()
    }
    rate = tide["trainers"][0]["train_tokens"] / max(tide["requests"]["end_s"])
    shift = min(one[0] for one in rows["tide"])
    swap = report["first_swap_after_shift_s"]
    at, lengths = [0.0], [length["no_learning"]]
    # The same prompts with the draft that is never trained say how easy they are.
    pairs = list(zip(rows["tide"], rows["no_learning"], strict=True))
    pairs = [pair for pair in pairs if pair[0][0] > shift + swap]
    for i in range(0, len(pairs) - BLOCK + 1, BLOCK):
        learnt, frozen = zip(*pairs[i : i + BLOCK], strict=True)
        middle = sum(one[0] + one[1] for one in learnt) / (2 * BLOCK)
        at.append(rate * (middle - shift))
        lengths.append(lengths[0] * steps_length(learnt) / steps_length(frozen))
    after, tau = fit_curve(at, lengths)
    return {
        "serve_tokens_per_s": none["output_tokens_per_s_by_phase"]["after_shift"],
        "prefill_share": none["mean_ttft_s"] / none["mean_e2e_s"],
        "static_step_cost": cost["frozen"],
        "static_length": length["frozen"],
        "step_cost": cost["no_learning"],
        "length_before": length["no_learning"],
        "length_after": after,
        "tokens_to_63_percent": tau,
        "train_tokens_per_s": rate,
        "deploy_seconds": swap,
        TIDE_COST: cost["tide"],
    }


def cluster_of(found: Inputs, static: bool) -> Cluster:
    """A cluster file of these inputs, read as `vllm-tide plan` does."""
    serves = {"serve_tokens_per_s": found["serve_tokens_per_s"]}
    trains = {"train_tokens_per_s": found["train_tokens_per_s"]}
    length = "static_length" if static else "length_before"
    content = {
        "classes": [
            {"name": "engine's core", "count": 1, **serves},
            {"name": "other core", "count": 1, "serve_tokens_per_s": 0, **trains},
        ],
        "draft": {
            "length_before": found[length],
            "length_after": found["length_after"],
            "tokens_to_63_percent": found["tokens_to_63_percent"],
            "step_cost": max(1, found["static_step_cost" if static else "step_cost"]),
            # The measured rate is already what the rows allowed.
            "passes": 1000,
        },
        "workload": {
            "shift_every_hours": 1,
            "prefill_share": found["prefill_share"],
        },
        "deploy_seconds": found["deploy_seconds"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return read_cluster(path)


def case_of(found: Inputs, static: bool = False) -> Case:
    """The planner's case; `static`: drafted for even where it does not pay."""
    cluster = cluster_of(found, static)
    values = {name: x.at(0.5) for name, x in cluster.inputs.items()}
    return cluster.case(values, control=not static)


def predict(found: Inputs, tokens: int) -> dict[str, float]:
    """Tokens/s of each arm over so many tokens after the shift."""
    case = case_of(found)
    low, high = 0.0, tokens / case.plain
    for _ in range(50):
        middle = (low + high) / 2
        enough = case.tokens((0.0, 1.0), middle) >= tokens
        low, high = (low, middle) if enough else (middle, high)
    return {
        "none": case.plain,
        "frozen": case_of(found, static=True).frozen,
        "no_learning": case.frozen,
        "tide": tokens / high,
    }


def compare(reports: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line for every arm of every run, predicted by every run."""
    inputs = {name: inputs_of(report) for name, report in reports.items()}
    for source, found in inputs.items():
        for name, report in reports.items():
            stream = report["environment"]["stream"]
            tokens = stream["num_after"] * stream["max_tokens"]
            for arm, said in predict(found, tokens).items():
                phases = report["arms"][arm]["output_tokens_per_s_by_phase"]
                measured = phases["after_shift"]
                line = {
                    "inputs_of": source,
                    "run": name,
                    "arm": arm,
                    "predicted": round(said, 2),
                    "measured": measured,
                    "ratio": round(said / measured, 4),
                }
                if abs(said / measured - 1) > WITHIN:
                    line["off"] = blame(found, inputs[name], tokens, arm, measured)
                yield line


def blame(found: Inputs, true: Inputs, tokens: int, arm: str, measured: float) -> str:
    """The input that would mend a prediction most if it were the predicted run's."""
    changes = {name: {name: true[name]} for name in true if name not in CURVE}
    changes["curve"] = {name: true[name] for name in CURVE}
    changes[TIDE_COST] = {"step_cost": true[TIDE_COST]}
    mended = {
        name: predict({**found, **change}, tokens)[arm] / measured
        for name, change in changes.items()
    }
    name = min(mended, key=lambda name: abs(mended[name] - 1))
    (old, new), *_ = [(found[k], v) for k, v in changes[name].items()]
    return f"{name} {old:.4g}, was {new:.4g}: then {mended[name]:.3f}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="*", type=Path, default=STORED)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, print, store."""
    args = parse_args(argv)
    reports = {path.name.partition(".")[0]: read_report(path) for path in args.reports}
    for name, report in reports.items():
        found = {k: float(f"{v:.4g}") for k, v in inputs_of(report).items()}
        print(f"{name}: {json.dumps(found)}")
    lines = list(compare(reports))
    print(f"\n{'inputs of':16}{'run':16}{'arm':14}predicted  measured  ratio")
    for one in lines:
        print(
            f"{one['inputs_of']:16}{one['run']:16}{one['arm']:14}"
            f"{one['predicted']:9.1f}{one['measured']:10.1f}{one['ratio']:7.3f}"
            f"  {one.get('off', '')}".rstrip()
        )
    own = [one for one in lines if one["inputs_of"] == one["run"]]
    for what, some in (("own", own), ("all", lines)):
        within = sum("off" not in one for one in some)
        print(f"{what} runs: {within} of {len(some)} within {WITHIN:.0%}")
    if args.json:
        table = {
            "commits": {k: r["environment"].get("commit") for k, r in reports.items()},
            "inputs": {name: inputs_of(report) for name, report in reports.items()},
            "lines": lines,
        }
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return int(any("off" in one for one in own))


if __name__ == "__main__":
    sys.exit(main())
