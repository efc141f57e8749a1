#!/usr/bin/env bash
# Check the CUDA path without a GPU, on a replacement of CUDA's runtime and driver whose
# kernels do nothing (null_gpu/runtime.c).
#
#   scripts/null_gpu.sh [CHECK] [--json FILE] [--venv DIR] [--build DIR] [-- more options]
#
# CHECK (default: counts)
#   counts    calls of a step (launches, copies, waits, allocations) beyond upstream's
#   matrix    start, steps, swaps, rollback and end in each combination of options
#   races     reads before their copies have landed: none, and each planted one is found
#   alias     rows are packed before the draft's graphs, which overwrite them
#   host      host time per call of a step into vllm_tide, at an 8B's shape
#
#   --venv DIR    an environment with a CUDA build of torch and vLLM 0.32.0, patched with
#                 `vllm-tide patch apply` (default: $TIDE_NULL_VENV)
#   --build DIR   build folder of the null GPU (default: build/null_gpu)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TIDE_NULL_VENV:-} build=$here/build/null_gpu check=counts json=()
die() { echo "null_gpu.sh: $*" >&2; exit 2; }
usage() { sed -n '2,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

while [ $# -gt 0 ]; do
    case $1 in
        counts | matrix | races | alias | host) check=$1; shift ;;
        --json) [ $# -gt 1 ] || usage 2; json=(--json "$2"); shift 2 ;;
        --venv) [ $# -gt 1 ] || usage 2; venv=$2; shift 2 ;;
        --build) [ $# -gt 1 ] || usage 2; build=$2; shift 2 ;;
        --) shift; break ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
[ -x "$venv/bin/python" ] || die "--venv: no bin/python in '$venv'."
build=$(realpath -m "$build")

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" "$here/scripts/demo/unpack.py"
bash "$here/scripts/null_gpu/build.sh" "$site" "$build"

export PYTHONPATH="$here:$here/scripts:$here/scripts/null_gpu/site" LD_LIBRARY_PATH="$build"
export LD_PRELOAD="$build/nullrt.so" VLLM_USE_FLASHINFER_SAMPLER=0
export VLLM_NCCL_SO_PATH="$build/nullrt.so"
case $check in
    counts) check=run ;;
    alias) check=matrix; set -- --only alias "$@" ;;
esac
exec "$venv/bin/python" "$here/scripts/null_gpu/$check.py" "${json[@]}" "$@"
