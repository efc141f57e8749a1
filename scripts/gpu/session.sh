#!/usr/bin/env bash
# Run the steps of a session on a GPU, the first fifteen minutes: PASS or FAIL each.
#
#   scripts/gpu/session.sh [--minutes M] [--only A,B] [--again] [--dry-run]
#   scripts/gpu/session.sh --list
#
# Passed steps are skipped, except with --again; figures are written after each part.
# --dry-run: the smallest sizes on the null GPU, where figures have no meaning.
# Exit status: 0 all passed, 1 a step failed, 2 usage error.
# Environment: TIDE_VENV (default: .venv in the checkout), or TIDE_PYTHON (a Python with
# the patched vLLM and this package); TIDE_GPU_WORK (default: out/gpu), the folder of
# results, models and logs, which the next call continues; OUT, if set, gets copies of
# session.json and session.tar.gz.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export TIDE_GPU_WORK=${TIDE_GPU_WORK:-$here/out/gpu}
die() { echo "session.sh: $*" >&2; exit 2; }
case " $* " in
    *" --list "*) exec python3 "$here/scripts/gpu/session.py" "$@" ;;
esac
python=${TIDE_PYTHON:-${TIDE_VENV:-$here/.venv}/bin/python}
command -v "$python" > /dev/null || die "TIDE_VENV: $python does not exist; run scripts/install.sh first."
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
"$python" "$here/scripts/demo/unpack.py"
case " $* " in
    *" --dry-run "*)
        site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        bash "$here/scripts/null_gpu/build.sh" "$site" "$here/build/null_gpu"
        export PYTHONPATH="$PYTHONPATH:$here/scripts/null_gpu/site" TIDE_GPU_WORK=$TIDE_GPU_WORK/dry
        export LD_LIBRARY_PATH="$here/build/null_gpu" VLLM_USE_FLASHINFER_SAMPLER=0
        exec env LD_PRELOAD="$here/build/null_gpu/nullrt.so" \
            "$python" "$here/scripts/gpu/session.py" "$@"
        ;;
esac
exec "$python" "$here/scripts/gpu/session.py" "$@"
