"""``vllm-tide patch``: install, judge, remove, check and move the vLLM patches."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_tide import patch_series, patching
from vllm_tide.patch_series import PatchError
from vllm_tide.patching import PatchState, Status

EXIT_CODES = {
    PatchState.APPLIED: 0,
    PatchState.ABSENT: 1,
    PatchState.STALE: 3,
    PatchState.FOREIGN: 4,
}
EXIT_ERROR = 5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command to the main parser."""
    parser = subparsers.add_parser(
        "patch", help="Install, judge and remove the vLLM patches."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("apply", "Install the series (nothing happens if it is installed)."),
        ("status", "Say absent, applied, stale or foreign (exit 1, 0, 3, 4)."),
        ("revert", "Restore the original files byte for byte."),
        ("check", "Check the series itself: files, headers, manifest, clean apply."),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--target",
            type=Path,
            metavar="DIR",
            help="site-packages folder with vllm in it (default: this Python's)",
        )
        action.add_argument(
            "--patches", type=Path, metavar="DIR", help="patch folder (default: own)"
        )
    action.add_argument(
        "--pristine",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder with a pristine vllm package; repeat for each form of it "
        "(default: the target, with its saved originals)",
    )
    action.add_argument(
        "--update-manifest",
        action="store_true",
        help="write manifest.json from the series and all --pristine folders",
    )
    _add_rebase(actions)


def _add_rebase(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    text = "Say how the series fits another release of vLLM; no installed one is used."
    action = actions.add_parser("rebase", help=text, description=text)
    action.add_argument(
        "--to", required=True, metavar="VERSION", help="the release, such as 0.33.0"
    )
    action.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="its source archive, wheel or unpacked folder (default: the archive of "
        "pip's package index)",
    )
    action.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the moved series to this new folder, if all of it applies",
    )
    action.add_argument("--json", action="store_true", help="the report as JSON")
    action.add_argument(
        "--patches", type=Path, metavar="DIR", help="patch folder (default: own)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action."""
    try:
        if args.action == "check":
            return _check(args)
        if args.action == "rebase":
            return _rebase(args)
        if args.action == "status":
            return _show(patching.status(args.target, args.patches))
        if args.action == "apply":
            return _show(patching.apply(args.target, args.patches))
        result = patching.revert(args.target, args.patches)
        print(f"{result.state}: {result.sentence}")
        return 0 if result.state is PatchState.ABSENT else EXIT_CODES[result.state]
    except PatchError as error:
        print(f"vllm-tide patch {args.action}: {error}", file=sys.stderr)
        return EXIT_ERROR


def _rebase(args: argparse.Namespace) -> int:
    # Not needed by the other actions, which run at image build and in start-up checks.
    from vllm_tide import patch_fetch, patch_rebase

    root = args.patches or patch_series.patches_root()
    with tempfile.TemporaryDirectory() as scratch:
        source = args.source or patch_fetch.fetch_sdist(args.to, Path(scratch))
        result = patch_rebase.rebase(root, args.to, source)
    if args.json:
        print(json.dumps(patch_rebase.as_json(result), indent=2))
    else:
        print(patch_rebase.as_text(result))
    if args.out is None:
        return 0 if result.applies else 1
    if not result.applies:
        print(f"not written to {args.out}: not all of it applies", file=sys.stderr)
        return 1
    files = patch_rebase.write_series(result, root, args.out)
    print(f"{len(files)} files written to {args.out}", file=sys.stderr)
    return 0


def _show(result: Status) -> int:
    print(f"{result.state}: {result.sentence}")
    if result.state in (PatchState.STALE, PatchState.FOREIGN):
        for path, kind in result.files.items():
            print(f"  {kind:12} {path}")
    return EXIT_CODES[result.state]


def _check(args: argparse.Namespace) -> int:
    root = args.patches or patch_series.patches_root()
    patches = patch_series.load_series(root)
    problems = patch_series.lint(root, patches)
    readers = _pristine_readers(args, root)
    if readers:
        built = patch_series.build_manifest(patches, readers)
        path = patch_series.manifest_path(root)
        if args.update_manifest:
            path.write_text(built.dump())
        problems += _compare(patch_series.load_manifest(root), built)
    else:
        print("no vLLM here: the clean apply and the manifest are not checked")
    for patch in patches:
        files = ", ".join(patch.hunks)
        print(f"{patch.name}: {patch.num_added} lines added in {files}")
    touched = {path for patch in patches for path in patch.hunks}
    print(
        f"budget: {len(patches)} patches, {sum(p.num_added for p in patches)} added "
        f"lines, {len(touched)} files"
    )
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"patch check: {len(problems)} problems")
    return 1 if problems else 0


def _pristine_readers(
    args: argparse.Namespace, root: Path
) -> list[Callable[[str], bytes]]:
    if args.pristine:
        return [patching.find_target(folder).read for folder in args.pristine]
    if args.update_manifest:
        raise PatchError("--update-manifest needs --pristine (see scripts/patches.sh).")
    try:
        target = patching.find_target(args.target)
    except PatchError:
        if args.target:
            raise
        return []
    manifest = patch_series.load_manifest(root)
    return [lambda path: patching.read_pristine(target, manifest, path)]


def _compare(
    manifest: patch_series.Manifest, built: patch_series.Manifest
) -> list[str]:
    problems = []
    if manifest.patches != built.patches:
        problems.append("manifest.json lists other patches than series: export again")
    if manifest.images.keys() != built.images.keys():
        problems.append("manifest.json lists other files than the series touches")
    for path, pairs in built.images.items():
        known = manifest.images.get(path, {})
        if any(known.get(before) != after for before, after in pairs.items()):
            problems.append(f"manifest.json is out of date for {path}")
    return problems
