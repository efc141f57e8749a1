#!/usr/bin/env bash
# Run one of the six calls of a session on a GPU: steps with PASS or FAIL, then a summary.
#
#   scripts/gpu/session.sh CALL [--minutes M] [--only A,B] [--again] [--dry-run]
#   scripts/gpu/session.sh CALL --list
#
# CALL is 1 (bring-up) to 6 (gain). Passed steps are skipped, except with --again.
# --dry-run: the smallest sizes on the null GPU, where figures have no meaning.
# Exit status: 0 all passed, 1 a step failed, 2 usage error.
# Environment: TIDE_VENV (default: .venv in the checkout), or TIDE_PYTHON (a Python with
# the patched vLLM and this package); OUT (default: out/gpu); for --dry-run NULL_GPU, the
# folder of the null GPU, as in scripts/null_gpu.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OUT=${OUT:-$here/out/gpu}
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
        [ -f "${NULL_GPU:-}/nullrt.c" ] || die "NULL_GPU: no nullrt.c in '${NULL_GPU:-}'."
        site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        bash "$here/scripts/null_gpu/build.sh" "$NULL_GPU" "$site" "$here/build/null_gpu"
        export PYTHONPATH="$PYTHONPATH:$NULL_GPU/py" OUT=$OUT/dry
        export LD_LIBRARY_PATH="$here/build/null_gpu" VLLM_USE_FLASHINFER_SAMPLER=0
        exec env LD_PRELOAD="$here/build/null_gpu/nullrt.so" \
            "$python" "$here/scripts/gpu/session.py" "$@"
        ;;
esac
exec "$python" "$here/scripts/gpu/session.py" "$@"
