"""Make the demo target and draft from the running CPython's own files.

Stages, in order: ``corpus``, ``tokenizer``, ``target``, ``prompts``, ``draft``,
``serve-check``, ``release``. Each reads what the earlier ones left in ``--work``.
Example::

    python scripts/make_demo_model.py corpus --work /tmp/demo
    python scripts/make_demo_model.py tokenizer --work /tmp/demo
    python scripts/make_demo_model.py target --work /tmp/demo --minutes 75
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

DEFAULT_WORK = Path("/tmp/vllm-tide-demo")
Stage = argparse.Namespace


def _corpus(args: Stage) -> Any:
    from demo import corpus

    return corpus.build(args.work)


def _tokenizer(args: Stage) -> Any:
    from demo import tokens

    if args.tokenizer:
        tokens.keep(args.work, args.tokenizer)
    else:
        tokens.train(args.work)
    return tokens.encode_corpus(args.work)


def _target(args: Stage) -> Any:
    from demo import target

    _set_threads(args)
    options = target.TargetOptions(
        minutes=args.minutes, seed=args.seed, start=args.start
    )
    return target.train(args.work, options)


def _prompts(args: Stage) -> Any:
    from demo import prompts

    _set_threads(args)
    folder = args.work / "target"
    return prompts.write(args.work, folder, args.output, args.per_domain)


def _draft(args: Stage) -> Any:
    from demo import draft

    _set_threads(args)
    options = draft.DraftOptions(
        domains=tuple(args.domains), minutes=args.minutes, seed=args.seed
    )
    return draft.make(args.work, args.work / "target", options)


def _serve_check(args: Stage) -> Any:
    from demo import serve_check

    return serve_check.measure(
        args.work / "target", args.work / "draft", args.prompts, args.domains
    )


def _release(args: Stage) -> Any:
    from demo import release

    return release.release(args.work, args.output)


def _set_threads(args: Stage) -> None:
    import torch

    torch.set_num_threads(args.threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--work", type=Path, default=DEFAULT_WORK)
    common.add_argument("--threads", type=int, default=1)

    def stage(name: str, run: Any) -> argparse.ArgumentParser:
        added = stages.add_parser(name, parents=[common])
        added.set_defaults(run=run)
        return added

    stage("corpus", _corpus)
    tokenizer = stage("tokenizer", _tokenizer)
    tokenizer.add_argument("--tokenizer", type=Path, help="keep that of this folder")
    target = stage("target", _target)
    target.add_argument("--minutes", type=float, default=75.0)
    target.add_argument("--seed", type=int, default=0)
    target.add_argument("--start", help="an exported target to go on from")
    prompts = stage("prompts", _prompts)
    prompts.add_argument("--output", type=Path, default=HERE / "demo" / "prompts")
    prompts.add_argument("--per-domain", type=int, default=400)
    draft = stage("draft", _draft)
    draft.add_argument("--domains", nargs="+", default=["python", "json", "diffs"])
    draft.add_argument("--minutes", type=float, default=30.0)
    draft.add_argument("--seed", type=int, default=0)
    served = stage("serve-check", _serve_check)
    served.add_argument("--prompts", type=Path, default=HERE / "demo" / "prompts")
    served.add_argument("--domains", nargs="+", default=["python", "docs_en", "c"])
    release = stage("release", _release)
    release.add_argument("--output", type=Path, default=HERE / "demo")
    return parser


def main() -> None:
    """Run one stage and print what it reports."""
    args = _parser().parse_args()
    sys.stdout.write(json.dumps(args.run(args), indent=1) + "\n")


if __name__ == "__main__":
    main()
