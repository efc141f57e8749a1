#!/usr/bin/env bash
# Run the tests of the C++ code with AddressSanitizer and UBSan.
#
#   scripts/sanitize.sh [EXAMPLES] [PYTEST ARGUMENTS]
#
# EXAMPLES is the number of inputs per parser of tests/fuzz (1000). The run stops with a
# report at the first finding of a sanitizer. The build is in a copy of the checkout. g++
# and its sanitizers are needed, no GPU and no server. Environment: TIDE_VENV (default:
# .venv in the checkout).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TIDE_VENV:-$here/.venv}/bin/python
export TIDE_FUZZ_EXAMPLES=1000
[[ ${1:-} =~ ^[0-9]+$ ]] && TIDE_FUZZ_EXAMPLES=$1 && shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp -r "$here"/{csrc,patches,pyproject.toml,scripts,tests,vllm_tide} "$scratch"
cd "$scratch"

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
g++ -shared -fPIC -std=c++17 -O1 -g -fno-omit-frame-pointer -Wall -Wextra \
    -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all \
    -DPy_LIMITED_API=0x030B0000 "-I$include" csrc/*.cpp -o vllm_tide/_shm.abi3.so

# Python leaks by design. Preload the libraries: Python is not linked with a sanitizer.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$scratch PYTHONMALLOC=malloc
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
LD_PRELOAD=$preload "$python" -c 'import sys, vllm_tide._shm as built
sys.exit(0 if built.__file__.startswith(sys.argv[1]) else f"tested is {built.__file__}")' "$scratch"
LD_PRELOAD=$preload "$python" -m pytest -q -p no:cacheprovider -m "not vllm" \
    tests/fuzz/test_fuzz.py tests/fuzz/test_found_memory.py tests/memory \
    tests/control/test_native.py tests/control/test_verifier.py \
    tests/transport/test_ring.py tests/transport/test_ring_properties.py \
    tests/transport/test_shm.py tests/transport/test_weights.py "$@"
