"""Compiling ahead of time: every kernel is listed, and what the table says is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu import compile_all as tool
from gpu.compile_all import Row, all_variants, cuda_usage, hip_usage
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

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_kl_kernel' for 'sm_90a'
ptxas info    : Function properties for _kl_kernel
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size
"""
AMDGCN = """
    .private_segment_fixed_size: 0
    .sgpr_count:     42
    .sgpr_spill_count: 0
    .symbol:         _kl_kernel.kd
    .vgpr_count:     97
    .vgpr_spill_count: 3
"""


def run(*options):
    """The command in a process without the interpreter."""
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


def test_usage_is_what_ptxas_and_the_assembly_say():
    assert cuda_usage(PTXAS) == {"registers": 64, "spills": 28}
    used = {"registers": 97, "scalar_registers": 42, "spills": 3}
    assert hip_usage(AMDGCN) == used
    assert cuda_usage("") == hip_usage("") == {}


def test_a_kernel_that_fails_is_a_sentence_and_exit_code_one(
    monkeypatch, capsys, tmp_path
):
    def fail(variant, target):
        return Row(variant.kernel_name, variant.name, target, False, "no such op")

    monkeypatch.setattr(tool, "HAVE_TRITON", True)
    monkeypatch.setattr(tool, "INTERPRETED", False)
    monkeypatch.setattr(tool, "compile_variant", fail)
    path = tmp_path / "rows.json"
    options = ["--target", "hip:gfx942", "--kernel", "_kl_", "--json", str(path)]
    assert tool.main(options) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "did not compile, the first is _kl_kernel (bf16-forward) for hip:gfx942: "
        "no such op"
    )
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {row["target"] for row in rows} == {"hip:gfx942"}
    assert not any(row["compiled"] for row in rows)
    assert tool.main(["--kernel", "nothing"]) == 1
    assert "no kernel has 'nothing' in its name" in capsys.readouterr().out
    monkeypatch.setattr(tool, "INTERPRETED", True)
    assert tool.main([]) == 1
    assert "unset TRITON_INTERPRET" in capsys.readouterr().out


@needs_triton
@pytest.mark.slow
def test_one_kernel_compiles_for_every_target(tmp_path):
    path = tmp_path / "rows.json"
    done = run("--kernel", "_floor", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["target"] for row in rows] == list(tool.TARGETS)
    for row in rows:
        assert row["compiled"] and row["registers"] > 0 and row["spills"] == 0
        assert row["shared_memory"] >= 0
        on_rocm = row["target"].startswith("hip")
        assert (row["scalar_registers"] is not None) == on_rocm


@needs_triton
@pytest.mark.nightly
def test_all_kernels_compile_for_every_target(tmp_path):
    path = tmp_path / "rows.json"
    done = run("--json", str(path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(all_variants()) * len(tool.TARGETS)
    for row in rows:
        assert row["compiled"]
        # A few bytes are nothing; more would say that a block is too large.
        assert row["spills"] is None or row["spills"] <= 64, row
        # MI300X has 64 KiB.
        assert row["shared_memory"] <= 64 << 10, row
