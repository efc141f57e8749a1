#!/usr/bin/env bash
# Gives damaged bytes to every parser that reads what another process wrote.
#
#   scripts/fuzz.sh [EXAMPLES] [PYTEST ARGUMENTS]
#
# EXAMPLES inputs for each parser (20000); `-k ring` takes one parser,
# `--hypothesis-seed N` gives the same inputs again. Fails with the smallest input that
# was found. Needs no GPU and no server. Environment: TIDE_VENV (default: .venv in the
# checkout).
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
