"""Replays a captured stream through the real trainer, without a server.

Each request is first drafted for by the live draft (teacher-forced, greedy), then
handed to the trainer, which trains and publishes as it would beside a server whose
requests each take `--steps-per-request` optimizer steps of time. So a knob of the
trainer is judged on a stream with shifts in minutes, on the same requests every time. A
case may also say `"prompts": true`: rows of the prompt are trained on too.

    online_replay.py --target DIR --draft DIR --samples FILE
        --case 'name={"learning_rate": 3e-4}' --case ... [--json FILE]

`--samples` is a file that `scripts/bench/run.py --suite loss --work DIR` leaves in DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.samples import load_samples
from json_text import json_text
from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.sample import Sample
from vllm_tide.train.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "batch_tokens": 1024,
    "min_new_tokens": 512,
    "holdout_share": 0.15,
}
"""As the learning suite's servers have them."""


def requests_of(samples: list[Sample]) -> list[list[Sample]]:
    """Documents by request, in order of appearance."""
    out: dict[int, list[Sample]] = {}
    for sample in samples:
        out.setdefault(sample.key, []).append(sample)
    return list(out.values())


def replay(
    target: TargetRows,
    draft: Path,
    shared: frozenset[str],
    parts: dict[str, list[Sample]],
    knobs: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One case: figures by part of the stream."""
    began = time.monotonic()
    knobs = dict(knobs)
    prompts = knobs.pop("prompts", False)
    config = TrainConfig(**{**SETTINGS, **knobs})
    trainer = Trainer(
        load_draft(draft, target, shared),
        target,
        config,
        num_speculative_tokens=args.depth,
    )
    credit, publications, steps = 0.0, 0, 0
    gains: list[list[float]] = []
    found: dict[str, Any] = {}
    for name, samples in parts.items():
        accepted: list[list[float]] = []
        for request in requests_of(samples):
            live = trainer.evaluate(trainer.live, samples=request)
            accepted.append([live.num_rows, sum(live.reached["greedy"])])
            trainer.add_samples(
                replace(s, num_prompt_tokens=1) if prompts else s for s in request
            )
            credit += args.steps_per_request
            while (
                trainer.buffer.new_tokens >= config.min_new_tokens
                and trainer.buffer.train_tokens
                and credit >= min(config.steps_per_cycle, trainer._num_steps())
            ):
                result = trainer.train_cycle()
                credit, steps = credit - result.steps, steps + result.steps
                gains.append([round(result.gain, 3), int(result.publish)])
                if result.publish:
                    trainer.published()
                    publications += 1
            credit = min(credit, float(config.steps_per_cycle))  # idle time is lost
        second = accepted[len(accepted) // 2 :]
        found[name] = {
            "acceptance_length": round(_length(accepted), 4),
            "second_half": round(_length(second), 4),
            "publications": publications,
            "gains": gains,
        }
        publications, gains = 0, []
    return {"parts": found, "steps": steps, "seconds": round(time.monotonic() - began)}


def _length(rows: list[list[float]]) -> float:
    return 1.0 + sum(a for _, a in rows) / max(1.0, sum(n for n, _ in rows))


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--case", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--steps-per-request", type=float, default=4.0)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--parts", type=int, help="only the first so many stretches")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts, facts = load_samples(args.samples)
    parts = dict(list(parts.items())[: args.parts])
    target = TargetRows.load(args.target)
    shared = frozenset(facts.get("shared", ()))
    out: dict[str, Any] = {}
    cases = [("frozen", {"min_gain": 99.0, "min_new_tokens": 1 << 40})]
    cases += [(n, json.loads(t)) for n, _, t in (c.partition("=") for c in args.case)]
    for name, knobs in cases:
        out[name] = replay(target, args.draft, shared, parts, knobs, args)
        row = "  ".join(
            f"{part} {f['acceptance_length']:.3f}/{f['second_half']:.3f}"
            f" ({f['publications']})"
            for part, f in out[name]["parts"].items()
        )
        print(f"{name:24} {row}  {out[name]['steps']} steps", flush=True)
        for part, figures in out[name]["parts"].items():
            print(f"  gains in {part}: {figures['gains']}", flush=True)
    if args.json is not None:
        options = {
            k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()
        }
        data = {"options": options, "cases": out}
        args.json.write_text(json_text(data), encoding="utf-8")


if __name__ == "__main__":
    main()
