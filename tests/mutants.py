"""Draw one-line mutants of the code at a commit, and run the tests on each.

    python tests/mutants.py draw --seed 1 --base COMMIT --json FILE [PREFIX ...]
    python tests/mutants.py run FILE --tree DIR --json RESULT

A moved line is identified by its text, its function and its neighbours. The tests are
the fast ones of the folders in `TESTS`, those that name the module first, or with
`--engines` those of the middle tier that need no separate machine.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = ("patch", "doctor/", "top/", "cli/", "metrics", "config", "bench/", "sim/")
# The longest prefix counts. Without a match: the tests of the same folder.
TESTS = {
    "scripts/bench/": "bench",
    "scripts/fetch_vllm": "patches",
    "scripts/patches": "patches",
    "scripts/sim/": "sim",
    "tests/": "bench sim faults",
    "vllm_tide/cli/": "{stem} engine/test_{stem}.py patches cli admin test_config.py",
    "vllm_tide/config": "test_config.py cli",
    "vllm_tide/metrics": "dashboards top engine test_readme.py",
    "vllm_tide/patch": "patches",
}
FLIPS = {"<": "<=", ">": ">=", "==": "!=", "is": "is not", "in": "not in"}
FLIPS |= {"+": "-", "and": "or"}
FLIPS |= {after: before for before, after in FLIPS.items()}
SIGNS = re.compile(r"[<>=!]=|[<>+-]|\b(is not|not in|is|in|and|or)\b")
WARM = ("transformers", "scipy.stats", "safetensors.torch", "prometheus_client")
FAST = "not slow and not vllm and not alone and not nightly"
MIDDLE = "not alone and not nightly"
LIMIT_S = 300


def changes(node: ast.AST, line: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield possible changes of a node: begin and end (bytes of its line), new text."""
    whole = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    pairs: Any = ()
    match node:
        case ast.Compare():
            pairs = zip([node.left, *node.comparators], node.comparators, strict=False)
        case ast.BoolOp():
            pairs = zip(node.values, node.values[1:], strict=False)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            pairs = [(node.left, node.right)]
        case ast.Constant(value=bool()):
            yield *whole, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield from ((*whole, str(node.value + by)) for by in (1, -1))
        case ast.Return() if ast.unparse(node) != "return None":
            yield *whole, "return None"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if test.lineno == test.end_lineno == node.lineno:
                begin, end = test.col_offset, test.end_col_offset
                yield begin, end, f"not ({line[begin:end].decode()})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield *whole, "pass"
    for left, right in pairs:
        text = line[left.end_col_offset : right.col_offset].decode()
        sign = SIGNS.search(text) if left.end_lineno == right.lineno else None
        if sign and sign[0] in FLIPS:
            begin = left.end_col_offset + sign.start()
            yield begin, begin + len(sign[0]), FLIPS[sign[0]]


def mutants(path: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield mutants of a file: a line before and after, its function and neighbours."""
    lines = source.splitlines()

    def of(node: ast.AST, function: str) -> Iterator[dict[str, Any]]:
        function = getattr(node, "name", function)
        for child in ast.iter_child_nodes(node):
            at = getattr(child, "lineno", 0)
            whole = at == getattr(child, "end_lineno", 0) or hasattr(child, "test")
            line = lines[at - 1].encode()
            near = [text.strip() for text in lines[max(0, at - 2) : at + 1]]
            mutant = {"path": path, "line": at, "function": function, "near": near}
            mutant["before"] = line.decode().strip()
            for begin, end, new in changes(child, line) if whole else ():
                after = line[:begin] + new.encode() + line[end:]
                yield mutant | {"after": after.decode().strip()}
            yield from of(child, function)

    yield from of(ast.parse(source), "")


def draw(seed: int, count: int, base: str, prefixes: list[str]) -> list[dict[str, Any]]:
    """Draw one mutant each of as many lines, with equal probability."""

    def git(*args: str) -> str:
        return subprocess.check_output(["git", "-C", str(ROOT), *args], text=True)

    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for name in git("ls-tree", "-r", "--name-only", base).splitlines():
        if name.endswith(".py") and name.startswith(tuple(prefixes)):
            for mutant in mutants(name, git("show", f"{base}:{name}")):
                lines.setdefault((name, mutant["line"]), []).append(mutant)
    chance = random.Random(seed)
    return [chance.choice(lines[at]) for at in chance.sample(sorted(lines), count)]


def find(mutant: dict[str, Any], tree: Path) -> tuple[Path, int] | None:
    """Return the file and the line (from 0) of the same code in a tree."""
    result = []
    for top in ("vllm_tide", "scripts", "tests"):
        for path in (tree / top).rglob("*.py"):
            lines = [line.strip() for line in path.read_text().splitlines()]
            function = ""
            for at, line in enumerate(lines):
                head = re.match(r"(?:async def|def|class) (\w+)", line)
                function = head[1] if head else function
                if line == mutant["before"]:
                    near = lines[max(0, at - 1) : at + 2]
                    alike = len(set(near) & set(mutant["near"]))
                    alike += 2 * (function == mutant["function"])
                    alike += path.name == Path(mutant["path"]).name
                    result.append((alike, -abs(at + 1 - mutant["line"]), path, at))
    best = max(result, default=(0,))
    return best[2:] if best[0] > 2 or len(result) == 1 else None


def tests_of(path: Path, tree: Path) -> list[str]:
    """Return test files of a module, those that name it first."""
    name = path.relative_to(tree).as_posix()
    longest = max((p for p in TESTS if name.startswith(p)), key=len, default="")
    folders = TESTS.get(longest, name.split("/")[1]).format(stem=path.stem).split()
    places = [tree / "tests" / folder for folder in folders]
    result = [f for p in places for f in (p.glob("test_*.py") if p.is_dir() else [p])]
    result = sorted(file for file in result if file.is_file())
    named = re.compile(rf"\b{path.stem}\b")
    result.sort(
        key=lambda f: (path.stem not in f.stem, not named.search(f.read_text()))
    )
    return [str(file.relative_to(tree)) for file in result]


def run_tests(tree: Path, files: list[str], marks: str) -> str:
    """Return the outcome of tests in a fork that has imported the large modules."""
    log = tree / "mutant.log"
    if (pid := os.fork()) == 0:
        os.setsid()
        os.chdir(tree)
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        sys.path[:0] = [str(tree), str(tree / "scripts")]
        threading.Timer(LIMIT_S, os._exit, [99]).start()
        with contextlib.suppress(BaseException):
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks]
            os._exit(int(pytest.main([*options, "--timeout=100", *files])))
        os._exit(98)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    failures = re.findall(r"^(?:FAILED|ERROR) \S+", log.read_text(), re.MULTILINE)
    return "not found" if status in (0, 5) else f"found: {[*failures, status][0]}"


def run(
    drawn: list[dict[str, Any]], source: Path, out: Path, limit: int, marks: str
) -> None:
    """Run the tests on each mutant, in a copy of a tree; write outcomes to `out`."""
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    for name in WARM:
        __import__(name)
    fine: set[str] = set()
    count: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(source, tree, ignore=shutil.ignore_patterns(".git", "*.pyc"))
        os.environ["PYTHONPATH"] = f"{tree}:{tree / 'scripts'}"
        for mutant in drawn:
            place = find(mutant, tree)
            mutant["outcome"] = "does not apply"
            if place is not None:
                path, at = place
                mutant["place"] = f"{path.relative_to(tree)}:{at + 1}"
                text = path.read_text()
                lines = text.splitlines(keepends=True)
                lines[at] = lines[at].replace(mutant["before"], mutant["after"])
                files, failed = tests_of(path, tree), [""]
                mutant["outcome"] = "not found"
                while files and not fine.issuperset(failed):
                    path.write_text("".join(lines))
                    mutant["outcome"] = run_tests(tree, files, marks)
                    path.write_text(text)
                    failed = re.findall(r"tests/\S+?\.py", mutant["outcome"])
                    if (
                        fine.issuperset(failed)
                        or run_tests(tree, failed, marks) == "not found"
                    ):
                        fine.update(failed)
                    else:  # they fail without the mutant too
                        files.remove(failed[0])
                        mutant["outcome"] = "not found"
            print(mutant.get("place"), mutant["after"], mutant["outcome"], flush=True)
            out.write_text(json.dumps(drawn, indent=1))
            count[mutant["outcome"].split(":")[0]] += 1
            if count["found"] >= limit:
                break
    print(dict(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("rest", nargs="*", help="of draw: prefixes; of run: its file")
    parser.add_argument("--json", type=Path, required=True)
    for name, number in (("--seed", 0), ("--count", 50), ("--until-found", 10**9)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--tree", type=Path, default=ROOT)
    args = parser.parse_intermixed_args()
    if args.what == "draw":
        prefixes = args.rest or [f"vllm_tide/{name}" for name in NAMES]
        drawn = draw(args.seed, args.count, args.base, prefixes)
        args.json.write_text(json.dumps(drawn, indent=1))
    else:
        marks = MIDDLE if args.engines else FAST
        drawn = json.loads(Path(args.rest[0]).read_text())
        run(drawn, args.tree.resolve(), args.json, args.until_found, marks)


if __name__ == "__main__":
    main()
