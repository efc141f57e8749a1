"""The package imports and computes where Triton is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

sys.modules["triton"] = None  # as if it were not installed
import torch

sys.path.insert(0, "scripts")
from gpu import compile_all
from vllm_tide.kernels import launch
from vllm_tide.kernels.kl_loss import kl_rows
from vllm_tide.kernels.pack_rows import pack_rows
from vllm_tide.kernels.topk_teacher import topk_teacher

assert not launch.HAVE_TRITON and not launch.runs_triton(torch.zeros(1))
block = torch.zeros(3, 12, dtype=torch.bfloat16)
pack_rows([torch.ones(3, 4)] * 3, torch.arange(3, dtype=torch.int32), block)
assert block.eq(1).all()
assert topk_teacher(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids.tolist() == [[1, 2]]
logits = torch.zeros(2, 4)
grad = torch.empty_like(logits)
values = kl_rows(logits, logits + 3, torch.ones(2), reverse=False, grad_out=grad)
assert values.abs().max() < 1e-6 and grad.abs().max() < 1e-6
assert compile_all.main([]) == 1
"""


@pytest.mark.slow
def test_references_run_where_triton_is_missing():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout
