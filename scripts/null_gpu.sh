#!/usr/bin/env bash
# Measure the host cost of a step on a GPU (launches, copies, waits, allocations), and
# check that the CUDA path starts, captures graphs, swaps and stops. It runs on a null GPU:
# a replacement of CUDA runtime and driver with empty kernels, so no GPU is needed.
#
#   scripts/null_gpu.sh --null DIR --venv DIR [--build DIR] [-- options of null_gpu/run.py]
#
#   --null DIR    sources of the null GPU (build.sh, nullrt.c, py/) (default: $NULL_GPU)
#   --venv DIR    an environment with a CUDA build of torch and vLLM 0.32.0, patched with
#                 `vllm-tide patch apply` (default: $TIDE_NULL_VENV)
#   --build DIR   build folder of the null GPU (default: build/null_gpu)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
null=${NULL_GPU:-} venv=${TIDE_NULL_VENV:-} build=$here/build/null_gpu
die() { echo "null_gpu.sh: $*" >&2; exit 2; }
usage() { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

while [ $# -gt 0 ]; do
    case $1 in
        --null) [ $# -gt 1 ] || usage 2; null=$2; shift 2 ;;
        --venv) [ $# -gt 1 ] || usage 2; venv=$2; shift 2 ;;
        --build) [ $# -gt 1 ] || usage 2; build=$2; shift 2 ;;
        --) shift; break ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
[ -f "$null/nullrt.c" ] || die "--null: no nullrt.c in '$null'."
[ -x "$venv/bin/python" ] || die "--venv: no bin/python in '$venv'."
null=$(realpath "$null")
build=$(realpath -m "$build")

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" "$here/scripts/demo/unpack.py"
bash "$here/scripts/null_gpu/build.sh" "$null" "$site" "$build"

export PYTHONPATH="$here:$null/py" LD_LIBRARY_PATH="$build"
export LD_PRELOAD="$build/nullrt.so" VLLM_USE_FLASHINFER_SAMPLER=0
exec "$venv/bin/python" "$here/scripts/null_gpu/run.py" "$@"
