#!/usr/bin/env bash
# Fuzz every parser of data from another process.
#
#   scripts/fuzz.sh [EXAMPLES] [PYTEST ARGUMENTS]
#
# EXAMPLES is the number of inputs per parser (20000). `-k ring` selects one parser,
# `--hypothesis-seed N` repeats the same inputs. A failure is reported with the smallest
# failing input. No GPU and no server are needed. Environment: TIDE_VENV (default: .venv
# in the checkout).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TIDE_VENV:-$here/.venv}/bin/python
"$python" -c 'import hypothesis, vllm_tide._shm' 2>/dev/null || {
    echo "error: TIDE_VENV: $python lacks hypothesis or vllm_tide; run" \
        "scripts/install.sh --dev first" >&2
    exit 2
}
cd "$here"
export TIDE_FUZZ_EXAMPLES=20000
[[ ${1:-} =~ ^[0-9]+$ ]] && TIDE_FUZZ_EXAMPLES=$1 && shift
exec "$python" -m pytest -q -m nightly tests/fuzz/test_fuzz.py "$@"
