#!/usr/bin/env python
"""Runs `alias.py` of this tree and of the one before rows were staged early.

All graphs are captured on one stream, the case in which torch gives their blocks to
each other; as vLLM captures (`--streams apart`) blocks of target and draft lie apart.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from json_text import json_text

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "9d3d4e7"
FOUND = 262
"""Measured with torch 2.13.0 and vLLM 0.32.0, where git does not have the commit."""


def late(tree: Path, streams: str, timeout: float) -> int:
    """Reads that came too late in an engine of a tree.

    Raises:
        SystemExit: It failed, or never ran a step with PIECEWISE graphs.
    """
    path = f"{tree}:{os.environ['PYTHONPATH'].partition(':')[2]}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "null_gpu" / "alias.py"), streams],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            print(f"{tree.name}: {line}", flush=True)
            if found["piecewise"] and not found["faults"] and found["read"]:
                return sum(found["late"].values())
    raise SystemExit((done.stdout + done.stderr)[-6000:])


def main() -> None:
    """Count in both trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", choices=("one", "apart"), default="one")
    parser.add_argument("--timeout", type=float, default=540, help="seconds an engine")
    options = parser.parse_args()
    result: dict[str, Any] = {f"found_at_{BEFORE}": FOUND, "now": None}
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", BEFORE, "vllm_tide", "patches"],
        capture_output=True,
        check=False,
    )
    if archive.returncode == 0:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / BEFORE
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(tree, filter="data")
            # Built, not tracked.
            for built in (ROOT / "vllm_tide").glob("_shm.*.so"):
                (tree / "vllm_tide" / built.name).symlink_to(built)
            try:
                found = late(tree, options.streams, options.timeout)
                result[f"found_at_{BEFORE}"] = found
            except SystemExit as error:  # the environment has later patches
                print(error, file=sys.stderr)
                result["note"] = f"{BEFORE} does not run with these patches of vLLM: "
                result["note"] += "its number is the kept one."
    else:
        result["note"] = f"{BEFORE} is not in this clone: its number is the kept one."
    result["now"] = late(ROOT, options.streams, options.timeout)
    print(json.dumps(result), flush=True)
    if options.json:
        options.json.write_text(json_text(result), "utf-8")


if __name__ == "__main__":
    main()
