"""``vllm-tide patch``: install, check and remove the vLLM patches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vllm_tide import patching
from vllm_tide.cli import EXIT_NO, add_output, emit, fail
from vllm_tide.patching import Manifest, PatchError, PatchState, Reader, Status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text in (
        ("apply", "Install the series, unless it is installed already."),
        ("status", "Print absent, applied, stale or foreign; exit 0 only if applied."),
        ("revert", "Restore the original files byte for byte."),
        ("check", "Check the series: clean apply, manifest, size."),
    ):
        action = actions.add_parser(name, help=text, description=text)
        folder = partial(action.add_argument, type=Path, metavar="DIR")
        text = "site-packages folder with vllm in it (default: this Python's)"
        folder("--target", help=text)
        folder("--patches", help="patch folder (default: of this package)")
        if name == "status":
            add_output(action)
    text = (
        "folder with a pristine vllm package, repeatable for several builds (default: "
        "the target, with its saved originals)"
    )
    folder("--pristine", action="append", help=text)
    text = "write manifest.json from the series and all --pristine folders"
    action.add_argument("--update-manifest", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    try:
        if args.action == "check":
            return _check(args)
        result: Status = getattr(patching, args.action)(args.target, args.patches)
    except PatchError as error:
        return fail(error)
    lines = [f"{result.state}: {result.sentence}"]
    if result.state in (PatchState.STALE, PatchState.FOREIGN):
        lines += [f"  {kind:12} {path}" for path, kind in result.files.items()]
    if args.action == "status":
        facts = {"state": result.state, "sentence": result.sentence}
        status = emit(args, "\n".join(lines), facts | {"files": result.files})
        return status or EXIT_NO * (result.state is not PatchState.APPLIED)
    done = PatchState.ABSENT if args.action == "revert" else PatchState.APPLIED
    if result.state is done is PatchState.ABSENT:
        lines = [f"reverted: {result.sentence.partition(' is ')[0]} is as installed."]
    print(*lines, sep="\n")
    return EXIT_NO * (result.state is not done)


def _check(args: argparse.Namespace) -> int:
    root = args.patches or patching.patches_root()
    patches = patching.load_series(root)
    problems: list[str] = []
    if readers := _pristine_readers(args, root):
        built = patching.build_manifest(patches, readers)
        if args.update_manifest:
            text = json.dumps(built, indent=2) + "\n"
            patching.manifest_path(root).write_text(text)
        problems += _differences(patching.load_manifest(root), built)
    else:
        print("no vLLM installed: clean apply and manifest are not checked")
    for patch in patches:
        files = ", ".join(patch.hunks)
        print(f"{patch.name}: {len(patch.added)} lines added in {files}")
    print(
        f"budget: {len(patches)} patches, {sum(len(p.added) for p in patches)} added "
        f"lines, {len({path for patch in patches for path in patch.hunks})} files"
    )
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"patch check: {len(problems)} problems")
    return 1 if problems else 0


def _differences(manifest: Manifest, built: Manifest) -> Iterator[str]:
    if manifest["patches"] != built["patches"]:
        yield "manifest.json lists other patches than series: export again"
    if manifest["files"].keys() != built["files"].keys():
        yield "manifest.json lists other files than the series touches"
    for path in patching.out_of_date(manifest, built["files"]):
        yield f"manifest.json is out of date for {path}"


def _pristine_readers(args: argparse.Namespace, root: Path) -> list[Reader]:
    if args.pristine:
        targets = [patching.find_target(folder) for folder in args.pristine]
        return [partial(patching.read_file, target) for target in targets]
    if args.update_manifest:
        raise PatchError("--update-manifest needs --pristine (see scripts/patches.sh).")
    try:
        target = patching.find_target(args.target)
    except PatchError:
        if args.target:
            raise
        return []
    return [partial(patching.read_pristine, target, patching.load_manifest(root))]
