"""scripts/with_isa.sh: a process computes like an older CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "with_isa.sh"
ASK = """
import torch, torch.backends.cpu
import vllm.platforms as platforms
platforms.current_platform.import_kernels()
maps = open("/proc/self/maps").read().splitlines()
loaded = {line.split("/")[-1] for line in maps}
print(torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_supported(),
      torch.cpu._is_amx_tile_supported(), "_C_AVX2.abi3.so" in loaded,
      "_C_AVX512.abi3.so" in loaded, "_C.abi3.so" in loaded)
"""


def ask(isa: str, code: str = ASK) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), isa, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.vllm
def test_vllm_and_torch_use_their_avx2_kernels():
    capability = ask("avx2").stdout.splitlines()[-1]
    assert capability == "AVX2 False False True False False"
