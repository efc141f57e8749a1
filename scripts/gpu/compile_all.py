"""Compile every kernel for every supported GPU on a machine without a GPU.

    scripts/gpu/compile_all.py [--target cuda:90 ...] [--json FILE]

Triton includes its compilers for CUDA and ROCm, so a machine without a GPU can check
that a kernel compiles for an MI300X, and report its registers and spills. The cache is
a temporary folder.

Registers and spills are read from the output of ptxas (CUDA) or from the metadata of
the assembly (ROCm).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_tide.kernels import (
    gather_step,
    kl_loss,
    ngram_memory,
    pack_rows,
    topk_teacher,
)
from vllm_tide.kernels.launch import HAVE_TRITON, INTERPRETED, Variant, triton

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "cuda:90": ("cuda", 90, 32),  # H100, H200
    "cuda:100": ("cuda", 100, 32),  # B200
    "hip:gfx942": ("hip", "gfx942", 64),  # MI300X
}
"""Back end, architecture and threads of a warp of each target."""

_OPS = (pack_rows, gather_step, topk_teacher, kl_loss, ngram_memory)
_REASON_CHARS = 400


@dataclass(frozen=True)
class Row:
    """One kernel on one target; None if the tool chain does not report it.

    Attributes:
        kernel: Name of the kernel.
        variant: Types and sizes.
        target: A key of `TARGETS`.
        compiled: Whether the kernel compiled.
        reason: Error message if not.
        seconds: Compile time.
        num_warps: Warps of a program.
        shared_memory: Shared memory of a program (bytes).
        registers: Registers of a thread (ROCm: vector registers).
        scalar_registers: Scalar registers of a warp; ROCm only.
        spills: CUDA: bytes stored to and loaded from local memory. ROCm: vector
            registers.
    """

    kernel: str
    variant: str
    target: str
    compiled: bool
    reason: str = ""
    seconds: float = 0.0
    num_warps: int | None = None
    shared_memory: int | None = None
    registers: int | None = None
    scalar_registers: int | None = None
    spills: int | None = None


def all_variants() -> list[Variant]:
    """Return every kernel of the package in its main dtypes and sizes."""
    return [variant for op in _OPS for variant in op.variants()]


def cuda_usage(log: str) -> dict[str, int]:
    """Return registers and spills from the output of `ptxas -v`."""
    usage = {"registers": re.findall(r"Used (\d+) registers", log)}
    usage["spills"] = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return {name: sum(map(int, values)) for name, values in usage.items() if values}


def hip_usage(assembly: str) -> dict[str, int]:
    """Return registers and spills from the metadata of AMD's assembly."""
    fields = {
        "vgpr_count": "registers",
        "sgpr_count": "scalar_registers",
        "vgpr_spill_count": "spills",
    }
    values = re.findall(r"^\s*\.(\w+):\s*(\d+)", assembly, re.MULTILINE)
    return {fields[name]: int(value) for name, value in values if name in fields}


def compile_variant(variant: Variant, target: str) -> Row:
    """Compile one kernel; a failure is returned in the row."""
    row = Row(variant.kernel_name, variant.name, target, compiled=False)
    began = time.perf_counter()
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            done = _compile(variant, target)
    except Exception as error:  # noqa: BLE001 - compilers raise any type
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(row, reason=reason[-_REASON_CHARS:])
    assembly = done.asm.get("amdgcn")
    usage = cuda_usage(log.getvalue()) if assembly is None else hip_usage(assembly)
    return replace(
        row,
        compiled=True,
        seconds=round(time.perf_counter() - began, 2),
        num_warps=done.metadata.num_warps,
        shared_memory=done.metadata.shared,
        **usage,
    )


def _compile(variant: Variant, target: str) -> Any:
    """Return Triton's compiled kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {n: variant.types.get(n, "constexpr") for n in names}
    # PyTorch aligns tensors to 16 bytes, and `triton.jit` passes this alignment to the
    # compiler at launch.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs=dict(variant.constants),
        attrs=aligned,
    )
    options = {"num_warps": variant.num_warps}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Use a temporary cache folder, and log the resource usage of ptxas."""
    knobs = triton.knobs
    with (
        tempfile.TemporaryDirectory(prefix="vllm_tide_kernels_") as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        yield


def compile_all(targets: Sequence[str], kernel: str = "") -> list[Row]:
    """Compile the matching kernels for the targets.

    Args:
        targets: Keys of `TARGETS`.
        kernel: Part of the kernel's name; empty: all kernels.
    """
    rows = []
    with _own_cache():
        for variant in all_variants():
            if kernel in variant.kernel_name:
                rows += [compile_variant(variant, target) for target in targets]
    return rows


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a table."""
    lines = [
        f"{'kernel':<24}{'variant':<24}{'target':<12}{'regs':>6}{'shared':>8}"
        f"{'spills':>8}{'s':>7}"
    ]
    for r in rows:
        used = r.registers, r.shared_memory, r.spills
        shown = ["-" if value is None else value for value in used]
        last = f"{r.seconds:7.2f}" if r.compiled else "  FAILED"
        lines.append(
            f"{r.kernel:<24}{r.variant:<24}{r.target:<12}"
            f"{shown[0]:>6}{shown[1]:>8}{shown[2]:>8}{last}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/compile_all.py",
        description="Compile every kernel ahead of time, without a GPU.",
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=sorted(TARGETS),
        help="only this target (may be repeated)",
    )
    parser.add_argument(
        "--kernel", default="", help="only kernels with this in their name"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args(argv)
    if not HAVE_TRITON:
        print("compile_all: Triton is not installed, so nothing can be compiled.")
        return 1
    if INTERPRETED:
        print("compile_all: unset TRITON_INTERPRET, which disables compilation.")
        return 1
    rows = compile_all(args.target or list(TARGETS), args.kernel)
    if args.json is not None:
        document = {"triton": triton.__version__, "rows": [asdict(r) for r in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    failed = [r for r in rows if not r.compiled]
    if not rows:
        print(f"compile_all: no kernel has {args.kernel!r} in its name.")
        return 1
    if failed:
        first = failed[0]
        print(
            f"compile_all: {len(failed)} of {len(rows)} did not compile, the first is "
            f"{first.kernel} ({first.variant}) for {first.target}: {first.reason}"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
