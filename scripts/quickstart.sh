#!/usr/bin/env bash
# From nothing to the answer: does a draft trained on live traffic serve faster?
#
#   scripts/quickstart.sh [--json FILE] [--picture FILE] [--venv DIR] [--short]
#                         [-- options of scripts/bench/suites/quickstart.py]
#
#   --json FILE      write the report here as well (default: build/quickstart/report.json)
#   --picture FILE   write the picture here (default: build/quickstart/report.png)
#   --venv DIR       the environment, made if absent (default: $TIDE_VENV or .venv)
#   --short          a few requests per arm: shows that everything runs, not the gain; too
#                    few for the gate's evidence, so a swap is not asked for
#
# Installs, patches, inflates the demo target, and replays one stream of prompts, whose
# domain shifts on the way, against four servers, in turns: no speculation, a frozen draft
# at the static length that is best before the shift, all but learning, everything.
# Exit status 0 only if the run was sound (see scripts/bench/README.md). SIGINT, SIGTERM
# and SIGHUP end all that it has started.
#
# Environment:
#   TIDE_DEMO        folder with target/, draft/ and prompts/ (default: scripts/demo)
#   TIDE_BUILD       folder for models, logs and results (default: build/quickstart)
#   TIDE_INFLATE     MLP width of the inflated target (default: 16384)
#   TIDE_NO_INSTALL  set to 1 to use --venv as it is
#   TIDE_ISA         avx2 or avx512_core: run as on an older CPU (scripts/with_isa.sh)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TIDE_VENV:-$here/.venv}
demo=${TIDE_DEMO:-$here/scripts/demo}
build=${TIDE_BUILD:-$here/build/quickstart}
width=${TIDE_INFLATE:-16384}
isa=("$here/scripts/with_isa.sh" "${TIDE_ISA:-native}")
json=
picture=
extra=()

die() { echo "quickstart.sh: $*" >&2; exit 1; }
say() { echo "quickstart.sh: [${SECONDS}s] $*"; }
usage() { sed -n '2,24s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

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
        --short) extra+=(--num-before 8 --num-after 44 --max-tokens 64 --min-swaps 0); shift ;;
        --) shift; extra+=("$@"); break ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
json=$(realpath -m "${json:-$build/report.json}")
picture=$(realpath -m "${picture:-$build/report.png}")

# The run changes directory: paths are made absolute.
venv=$(realpath -m "$venv")
demo=$(realpath -m "$demo")
build=$(realpath -m "$build")

# nproc follows OMP_NUM_THREADS.
[ "$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)" -ge 2 ] || die "two CPU cores are needed: one for the engine, one for the rest."
for part in target draft prompts; do
    [ -d "$demo/$part" ] || die "$demo/$part is missing."
done

if [ "${TIDE_NO_INSTALL:-0}" != 1 ]; then
    say "installing into $venv"
    part "$here/scripts/install.sh" --venv "$venv"
fi
python=$venv/bin/python
export TQDM_DISABLE=1  # transformers' bars
[ -x "$python" ] || die "$python is missing."
mkdir -p "$build"

# The same function at the cost of a larger model; remade when the source changes.
stamp=$(cat "$demo/target"/* | sha256sum | cut -c1-16)-$width
inflated=$build/target-$stamp
if [ ! -f "$inflated/inflated.json" ]; then
    say "inflating the target's MLP to $width (same outputs, higher cost)"
    part "${isa[@]}" "$python" "$here/scripts/inflate_model.py" "$demo/target" "$inflated.tmp" \
        --intermediate-size "$width"
    rm -rf "$inflated"
    mv "$inflated.tmp" "$inflated"
fi

say "four arms on one stream"
status=0
cd "$here"
part "${isa[@]}" "$python" scripts/bench/suites/quickstart.py --venv "$venv" \
    --target "$inflated" --draft "$demo/draft" --prompts "$demo/prompts" \
    --work "$build" --json "$json" --picture "$picture" "${extra[@]}" || status=$?
if [ $status -eq 0 ]; then
    say "sound; report $json, picture $picture"
else
    say "NOT sound, exit status $status; logs are in $build"
fi
exit $status
