#!/usr/bin/env bash
# Inject faults into a real server and a real trainer under load.
#
#   scripts/faults.sh --count 500 --json faults.json [--seed N] [--kinds A,B]
#
# The JSON has a row per fault: kind, outcome, recovery_s. See --help for all options.
# Environment: TIDE_VENV (default: .venv in the checkout).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export TIDE_VENV=${TIDE_VENV:-$here/.venv}
[ -x "$TIDE_VENV/bin/vllm" ] || {
    echo "error: TIDE_VENV: $TIDE_VENV has no vllm; run scripts/install.sh --venv first" >&2
    exit 2
}
# shellcheck source=scripts/env.sh
. "$here/scripts/env.sh"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$TIDE_VENV/bin/python" -m tests.faults "$@"
