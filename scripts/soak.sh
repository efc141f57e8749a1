#!/usr/bin/env bash
# Serve a steady load with a swap every few seconds, and check that memory, file
# descriptors, shared memory and latency do not grow.
#
#   scripts/soak.sh --minutes 30 --json soak.json [--swap-s 3] [--clients 3]
#   scripts/soak.sh --everything --minutes 60 --clients 8 --swap-s 20 \
#       --target MODEL --draft scripts/demo/smollm2_draft \
#       --prompts scripts/demo/chat_prompts --domains math,sql,tools --whole
#
# The second command serves a real model (scripts/demo/fetch_model.py) with memory and
# adaptation within a generation, cancels requests, runs an operator command each minute,
# kills the trainer twice and cleans the run directory once. See --help for the criterion.
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
exec "$TIDE_VENV/bin/python" -m tests.faults.soak "$@"
