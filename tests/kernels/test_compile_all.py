"""Ahead-of-time compilation: every kernel is listed, and the table is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu import compile_all as tool
from gpu.compile_all import all_variants
from vllm_tide.kernels import (
    gather_step,
    kl_loss,
    ngram_memory,
    pack_rows,
    topk_teacher,
)
from vllm_tide.kernels.launch import HAVE_TRITON

ROOT = Path(__file__).parents[2]
OPS = (pack_rows, gather_step, topk_teacher, kl_loss, ngram_memory)
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="needs triton")


def run(*options):
    """Run the command in a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "scripts/gpu/compile_all.py", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def kernels_of(op):
    return {n for n in vars(op) if n.startswith("_") and n.endswith("_kernel")}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__.split(".")[-1])
def test_every_kernel_has_a_variant(op):
    listed = {v.kernel for v in op.variants()}
    assert {getattr(op, name) for name in kernels_of(op)} == listed


@needs_triton
def test_variants_name_every_argument_once():
    for variant in all_variants():
        names = set(variant.kernel.arg_names)
        assert set(variant.types) | set(variant.constants) == names
        assert not set(variant.types) & set(variant.constants)
        # 16 warps of 64 threads are the most that ROCm runs as one program.
        assert variant.num_warps * 64 <= 1024
    keys = [(v.kernel_name, v.name) for v in all_variants()]
    assert len(set(keys)) == len(keys)


@needs_triton
@pytest.mark.parametrize(
    "only",
    [
        pytest.param(["--kernel", "_floor"], marks=pytest.mark.slow, id="one"),
        pytest.param([], marks=pytest.mark.nightly, id="all"),
    ],
)
def test_kernels_compile_for_every_target(tmp_path, only):
    path = tmp_path / "rows.json"
    done = run(*only, "--json", str(path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    variants = 1 if only else len(all_variants())
    assert len(rows) == variants * len(tool.TARGETS)
    for row in rows:
        assert row["compiled"] and (not only or row["registers"] > 0)
        # A few bytes are no problem; more would mean that a block is too large.
        assert row["spills"] is None or row["spills"] <= 64, row
        # MI300X has 64 KiB.
        assert 0 <= row["shared_memory"] <= 64 << 10, row
        on_rocm = row["target"].startswith("hip")
        assert (row["scalar_registers"] is not None) == on_rocm
