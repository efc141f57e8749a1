"""Make the demo target and draft from the running CPython's own files.

Stages, in order: ``corpus``, ``tokenizer``, ``target``, ``evaluate``,
``degeneracy``, ``prompts``, ``draft``, ``serve-check``, ``release``.
Each reads what the earlier ones left in ``--work``.
Example::

    python scripts/make_demo_model.py corpus --work /tmp/demo
    python scripts/make_demo_model.py tokenizer --work /tmp/demo
    python scripts/make_demo_model.py target --work /tmp/demo --minutes 75
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

DEFAULT_WORK = Path("/tmp/vllm-tide-demo")


def _show(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def _corpus(args: argparse.Namespace) -> None:
    from demo import corpus

    _show(corpus.build(args.work))


def _tokenizer(args: argparse.Namespace) -> None:
    from demo import tokens

    if args.tokenizer:
        tokens.keep(args.work, args.tokenizer)
    else:
        tokens.train(args.work)
    _show(tokens.encode_corpus(args.work))


def _target(args: argparse.Namespace) -> None:
    import torch

    from demo import target

    torch.set_num_threads(args.threads)
    options = target.TargetOptions(
        minutes=args.minutes, seed=args.seed, start=args.start
    )
    _show(target.train(args.work, options))


def _evaluate(args: argparse.Namespace) -> None:
    import torch

    from demo import evaluate

    torch.set_num_threads(args.threads)
    folder = args.model or args.work / "target"
    _show(evaluate.evaluate(args.work, folder, args.sequences))


def _prompts(args: argparse.Namespace) -> None:
    import torch

    from demo import prompts

    torch.set_num_threads(args.threads)
    folder = args.model or args.work / "target"
    _show(prompts.write(args.work, folder, args.output, args.per_domain))


def _degeneracy(args: argparse.Namespace) -> None:
    import torch

    from demo import degeneracy

    torch.set_num_threads(args.threads)
    report = degeneracy.measure(
        args.work,
        args.model or args.work / "target",
        num_prompts=args.num_prompts,
        num_tokens=args.num_tokens,
        temperature=args.temperature,
    )
    _show(report)


def _draft(args: argparse.Namespace) -> None:
    import torch

    from demo import draft

    torch.set_num_threads(args.threads)
    options = draft.DraftOptions(
        domains=tuple(args.domains),
        minutes=args.minutes,
        num_greedy=args.num_greedy,
        num_sampled=args.num_sampled,
        seed=args.seed,
    )
    _show(draft.make(args.work, args.model or args.work / "target", options))


def _serve_check(args: argparse.Namespace) -> None:
    from demo import serve_check

    report = serve_check.measure(
        args.model or args.work / "target",
        args.draft or args.work / "draft",
        args.prompts,
        args.domains,
        num_prompts=args.num_prompts,
        num_tokens=args.num_tokens,
        num_speculative_tokens=args.num_speculative_tokens,
        temperatures=args.temperatures,
    )
    _show(report)


def _release(args: argparse.Namespace) -> None:
    from demo import release

    _show(release.release(args.work, args.output))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--work", type=Path, default=DEFAULT_WORK)
    common.add_argument("--threads", type=int, default=1)
    stages.add_parser("corpus", parents=[common]).set_defaults(run=_corpus)
    tokenizer = stages.add_parser("tokenizer", parents=[common])
    tokenizer.add_argument("--tokenizer", type=Path, help="keep that of this folder")
    tokenizer.set_defaults(run=_tokenizer)
    target = stages.add_parser("target", parents=[common])
    target.add_argument("--minutes", type=float, default=75.0)
    target.add_argument("--seed", type=int, default=0)
    target.add_argument("--start", help="an exported target to go on from")
    target.set_defaults(run=_target)
    evaluate = stages.add_parser("evaluate", parents=[common])
    evaluate.add_argument("--model", type=Path, help="default: WORK/target")
    evaluate.add_argument("--sequences", type=int, default=60)
    evaluate.set_defaults(run=_evaluate)
    prompts = stages.add_parser("prompts", parents=[common])
    prompts.add_argument("--model", type=Path, help="default: WORK/target")
    prompts.add_argument("--output", type=Path, default=HERE / "demo" / "prompts")
    prompts.add_argument("--per-domain", type=int, default=400)
    prompts.set_defaults(run=_prompts)
    degeneracy = stages.add_parser("degeneracy", parents=[common])
    degeneracy.add_argument("--model", type=Path, help="default: WORK/target")
    degeneracy.add_argument("--num-prompts", type=int, default=64)
    degeneracy.add_argument("--num-tokens", type=int, default=128)
    degeneracy.add_argument("--temperature", type=float, default=0.0)
    degeneracy.set_defaults(run=_degeneracy)
    draft = stages.add_parser("draft", parents=[common])
    draft.add_argument("--model", type=Path, help="default: WORK/target")
    draft.add_argument("--domains", nargs="+", default=["python", "json", "diffs"])
    draft.add_argument("--minutes", type=float, default=30.0)
    draft.add_argument("--num-greedy", type=int, default=900)
    draft.add_argument("--num-sampled", type=int, default=1100)
    draft.add_argument("--seed", type=int, default=0)
    draft.set_defaults(run=_draft)
    served = stages.add_parser("serve-check", parents=[common])
    served.add_argument("--model", type=Path, help="default: WORK/target")
    served.add_argument("--draft", type=Path, help="default: WORK/draft")
    served.add_argument("--prompts", type=Path, default=HERE / "demo" / "prompts")
    served.add_argument("--domains", nargs="+", default=["python", "docs_en", "c"])
    served.add_argument("--num-prompts", type=int, default=64)
    served.add_argument("--num-tokens", type=int, default=96)
    served.add_argument("--num-speculative-tokens", type=int, default=3)
    served.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.5])
    served.set_defaults(run=_serve_check)
    release = stages.add_parser("release", parents=[common])
    release.add_argument("--output", type=Path, default=HERE / "demo")
    release.set_defaults(run=_release)
    return parser


def main() -> None:
    """Run one stage."""
    args = _parser().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
