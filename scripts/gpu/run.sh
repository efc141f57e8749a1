#!/usr/bin/env bash
# One stage of the measurements on a GPU, each under ten minutes on one GPU.
#
#   scripts/gpu/run.sh --list
#   scripts/gpu/run.sh STAGE --json FILE [--cpu] [--minutes M]
#
# Called again with the same FILE it goes on where it stopped. Exit status: 0 complete,
# 1 something was measured wrong or failed, 2 it cannot run here, 3 time is over (call it
# again). --cpu runs tiny sizes without a GPU, to prove that the command works.
# Environment: TIDE_VENV (default: .venv in the checkout), or TIDE_PYTHON (a Python whose
# path of modules already has the patched vLLM and vllm_tide).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${TIDE_PYTHON:-${TIDE_VENV:-$here/.venv}/bin/python}
command -v "$python" > /dev/null || {
    echo "error: TIDE_VENV: there is no $python; run scripts/install.sh first" >&2
    exit 2
}
cd "$here"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
"$python" "$here/scripts/demo/unpack.py"
exec "$python" "$here/scripts/gpu/stage.py" "$@"
