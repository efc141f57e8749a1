"""Three arms on one stream: no speculation, a frozen draft, TIDE.

Run by ``scripts/quickstart.sh``; every arm gets the same prompts in the same order,
the same number of tokens, the same cores.  Exit status 0 only if the run was sound.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from vllm_tide.config import parse_tide
from vllm_tide.speculative import merged

from .arm import ArmOptions, run_arm
from .identity import compare_arms, rescore_all
from .picture import draw
from .report import ARMS, build_report, environment, problems, table
from .server import ServerError, ServerOptions
from .stream import StreamOptions, StreamRequest, build_stream, read_prompts
from .summary import ArmRun


def speculative_config(draft: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """Return what the frozen and the TIDE arm have in common."""
    return {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": num_speculative_tokens,
    }


def tide_section(run_dir: Path) -> dict[str, Any]:
    """Return the demo's ``tide`` section: the full mode, sized for a short stream."""
    return {
        "run_dir": str(run_dir),
        "train": {
            "batch_tokens": 1024,
            "max_sample_tokens": 512,
            # A new cycle as soon as a few requests came; few steps, since more of them
            # on so few requests only cost the core that the client needs too.
            "min_new_tokens": 512,
            "steps_per_cycle": 12,
            "holdout_share": 0.15,
            # The stream is short and public: what is learnt by heart harms nobody.
            "max_passes": 24,
        },
    }


def mode_of(section: Mapping[str, Any]) -> str:
    """Return "full" if a ``tide`` section leaves every part as it is by default."""
    tide, full = parse_tide(dict(section)), parse_tide({})
    parts = ("capture.enabled", "train.autostart", "deploy.canary", "swap.enabled")
    same = all(attrgetter(p)(tide) == attrgetter(p)(full) for p in parts)
    return "full" if same and tide.control == full.control else "changed"


def _arm_options(args: argparse.Namespace, name: str) -> ArmOptions:
    config: str | None = None
    run_dir: Path | None = None
    spec = speculative_config(args.draft, args.num_speculative_tokens)
    if name == "frozen":
        config = json.dumps(spec)
    elif name == "tide":
        # Short: also a place for sockets; private: mode 0700.
        run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_quickstart_"))
        section = tide_section(run_dir)
        path = args.work / "tide.json"
        text = json.dumps({**spec, "tide": merged(section, args.tide)}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path}:\n{text}", flush=True)
        config = str(path)
    server = ServerOptions(
        venv=args.venv,
        model=args.target,
        log_path=args.work / f"server-{name}.log",
        speculative_config=config,
        dtype=args.dtype,
        engine_cpus=tuple(args.engine_cpus),
        other_cpus=tuple(args.other_cpus),
        enforce_eager=not args.compile,
    )
    return ArmOptions(name, server, run_dir, args.time_limit_s, name == "tide")


def _keep_logs(run_dir: Path | None, work: Path) -> None:
    """Move the trainer's log and status beside the server logs."""
    if run_dir is None or not run_dir.exists():
        return
    kept = work / "tide-run"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run_dir, kept)
    shutil.rmtree(run_dir, ignore_errors=True)


def _run_arms(
    args: argparse.Namespace, stream: Sequence[StreamRequest]
) -> dict[str, ArmRun]:
    runs: dict[str, ArmRun] = {}
    deadline = time.monotonic() + args.total_limit_s
    for name in args.arms:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            print(f"[{name:>6}] left out: the time limit is over", flush=True)
            continue
        options = _arm_options(args, name)
        options = replace(options, time_limit_s=min(args.time_limit_s, left_s))
        try:
            runs[name] = run_arm(options, stream)
        except (ServerError, TimeoutError, RuntimeError, OSError) as error:
            what = str(error) or f"longer than {options.time_limit_s:.0f} s"
            print(f"[{name:>6}] {type(error).__name__}: {what}", flush=True)
        finally:
            _keep_logs(options.run_dir, args.work)
    return runs


def _cpus(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _cycle(text: str) -> tuple[int, ...]:
    return tuple(_cpus(text))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="quickstart", description=__doc__.split("\n")[0])
    p.add_argument("--venv", type=Path, default=Path(sys.prefix), help="patched vLLM")
    p.add_argument("--target", type=Path, required=True, help="served (inflated) model")
    p.add_argument("--draft", type=Path, required=True, help="EAGLE-3 draft folder")
    p.add_argument("--prompts", type=Path, required=True, help="<domain>.jsonl.gz")
    p.add_argument("--work", type=Path, required=True, help="logs and configuration")
    p.add_argument("--json", type=Path, help="write the report here")
    p.add_argument("--picture", type=Path, help="write the PNG here")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    d = StreamOptions()
    p.add_argument("--before-domain", default=d.before_domain)
    p.add_argument("--after-domain", default=d.after_domain)
    p.add_argument("--num-before", type=int, default=d.num_before, help="requests")
    p.add_argument("--num-after", type=int, default=d.num_after, help="requests")
    p.add_argument("--max-tokens", type=int, default=d.max_tokens)
    p.add_argument(
        "--concurrency", type=_cycle, default=d.concurrency_cycle, help="as in 1,2,4"
    )
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--num-speculative-tokens", type=int, default=3)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--engine-cpus", type=_cpus, default=[0])
    p.add_argument("--other-cpus", type=_cpus, default=[1], help="API, client, trainer")
    p.add_argument("--compile", action="store_true", help="no --enforce-eager")
    p.add_argument(
        "--tide", type=json.loads, default={}, help="JSON merged into the tide section"
    )
    p.add_argument("--time-limit-s", type=float, default=600.0, help="of a stream")
    p.add_argument("--total-limit-s", type=float, default=1800.0, help="of all arms")
    return p


def _pin_client(cpus: Sequence[int]) -> None:
    """Leave the engine's cores to the engine: the client belongs with the rest."""
    import os

    os.sched_setaffinity(0, cpus)


def _stream(args: argparse.Namespace) -> tuple[list[StreamRequest], dict[str, Any]]:
    options = StreamOptions(
        before_domain=args.before_domain,
        after_domain=args.after_domain,
        num_before=args.num_before,
        num_after=args.num_after,
        max_tokens=args.max_tokens,
        concurrency_cycle=args.concurrency,
        seed=args.seed,
    )
    before, after = (
        read_prompts(args.prompts, domain)
        for domain in (options.before_domain, options.after_domain)
    )
    return build_stream(before, after, options), asdict(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms, report, and say whether the run was sound."""
    args = parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    stream, stream_facts = _stream(args)
    began = time.monotonic()
    _pin_client(args.other_cpus)
    runs = _run_arms(args, stream)
    differences = compare_arms({name: run.results for name, run in runs.items()})
    print(f"comparing outputs: {len(differences)} first differences", flush=True)
    rescored = rescore_all(differences, args.target, args.dtype)
    inflated = args.target / "inflated.json"
    facts = environment(
        {
            "target_dtype": args.dtype,
            "target_inflation": json.loads(inflated.read_text())
            if inflated.exists()
            else None,
            "engine_cpus": args.engine_cpus,
            "client_api_trainer_cpus": args.other_cpus,
            "enforce_eager": not args.compile,
            "num_speculative_tokens": args.num_speculative_tokens,
            "stream": stream_facts,
            "wall_clock_s": round(time.monotonic() - began, 1),
        }
    )
    report = {"mode": mode_of(args.tide), **build_report(runs, rescored, facts)}
    reasons = problems(report, runs)
    report["sound"], report["problems"] = not reasons, reasons
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.picture and runs:
        title = f"Traffic shifts from {args.before_domain} to {args.after_domain}"
        draw(list(runs.values()), args.picture, title)
    print(table(report) if runs else "no arm ran")
    for reason in reasons:
        print(f"NOT SOUND: {reason}")
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
