#!/usr/bin/env bash
# Gives damaged bytes to every parser that reads what another process wrote.
#
#   scripts/fuzz.sh --seconds 300 --json fuzz.json [--parser NAME] [--seed N]
#
# One row per parser in the JSON; exit status 1 if anything was found. Needs no GPU and
# no server. A finding names the seed of its round: --parser NAME --seed N gives the
# same inputs again. Environment: TIDE_VENV (default: .venv in the checkout).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TIDE_VENV:-$here/.venv}/bin/python
"$python" -c 'import hypothesis, vllm_tide._shm' 2>/dev/null || {
    echo "error: TIDE_VENV: $python lacks hypothesis or vllm_tide; run" \
        "scripts/install.sh --dev first" >&2
    exit 2
}
cd "$here"
exec "$python" -m tests.fuzz "$@"
