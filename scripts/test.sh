#!/usr/bin/env bash
# Install everything, then run all checks; the last line is 'N passed, N failed, N skipped'.
#
#   scripts/test.sh [--fast|--nightly] [--json FILE]
#
#   --fast       only tests without engines and subprocesses: 2 minutes
#   (none)       also real engines, one server and one fault of each kind: 12 minutes
#   --nightly    also many seeds, AVX2, 500 faults, soak, fuzz, sanitizers, vLLM's tests
#   --json FILE  write {"tier", "passed", "failed", "skipped", "seconds",
#                "install_seconds", "slowest"}
#
# The minutes are for two idle cores, without the installation. vLLM's tests also run if
# `patches/` differs from the last release and from `origin/main`.
#
# Environment: TIDE_VENV (default: .venv in the checkout) and the variables of
# scripts/install.sh and scripts/upstream_tests.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export TIDE_VENV=${TIDE_VENV:-$here/.venv}
bin=$TIDE_VENV/bin
tier=all
json=
usage() { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }
while [ $# -gt 0 ]; do
    case $1 in
        --fast) tier=fast; shift ;;
        --nightly) tier=nightly; shift ;;
        --json) [ $# -gt 1 ] || usage 2; json=$(realpath -m "$2"); shift 2 ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
cd "$here"
exec < /dev/null
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1

# The output of the tests goes to the terminal; only the counts are collected.
scratch=$(mktemp -d)
broken=()
declare -A background=()
trap 'exit 130' INT
trap 'kill -- "${background[@]/#/-}" 2> /dev/null || :; rm -rf "$scratch"' EXIT

step() {
    local name=$1
    shift
    echo "=== $name [${SECONDS}s]"
    "$@" || broken+=("$name")
}

# begin NAME COMMAND: run the command in the background at the lowest priority. Servers run
# in separate sessions, and with autogroups niceness applies within a session only.
begin() {
    local name=$1
    shift
    setsid nice -n 19 sh -c '{ echo 19 > /proc/self/autogroup; } 2> /dev/null; exec "$@"' \
        sh "$@" > "$scratch/$name.txt" 2>&1 &
    background[$name]=$!
}

# end NAME: wait for the command and print its output.
end() {
    local code=0
    wait "${background[$1]}" || code=$?
    unset "background[$1]"
    cat "$scratch/$1.txt"
    return "$code"
}

# tests NAME MARKS [ARGUMENT ...]: run pytest on the tests with these marks.
tests() {
    local name=$1 marks=$2
    shift 2
    "$bin/python" -m pytest -m "$marks" --durations=5 --junitxml "$scratch/$name.xml" "$@"
}

# Exit status 0 if the patches differ from the last release and from main.
patches_changed() {
    local release main
    release=$(git describe --tags --abbrev=0 2> /dev/null) || release=
    main=$(git merge-base HEAD origin/main 2> /dev/null) || main=
    [ -n "$release$main" ] || return 1
    local base
    for base in $release $main; do
        ! git diff --quiet "$base" -- patches || return 1
    done
}

install_start=$SECONDS
scripts/install.sh --venv "$TIDE_VENV" --dev
install_seconds=$((SECONDS - install_start))
SECONDS=0
step "ruff check" "$bin/ruff" check .
step "ruff format" "$bin/ruff" format --check .
begin mypy "$bin/mypy"
step "fast tests" tests fast "not slow and not vllm and not alone and not nightly" -n 2
step "patch check" "$bin/vllm-tide" patch check
step "mypy" end mypy
if [ $tier != fast ]; then
    # Without this vLLM binds the engines of all workers to the same core.
    export VLLM_CPU_OMP_THREADS_BIND=nobind
    # Engines are idle at times, so three workers use two cores.
    step "tests on engines" tests engines "(slow or vllm) and not alone and not nightly" \
        -n 3 --dist loadscope --no-loadscope-reorder
    unset VLLM_CPU_OMP_THREADS_BIND
    # Kernel tests in Triton's interpreter run in one process, in parallel to the servers.
    begin kernels "$bin/python" -m pytest tests/kernels -m "alone and not nightly" \
        --junitxml "$scratch/kernels.xml"
    step "tests on servers" tests servers "alone and not nightly" \
        --ignore tests/kernels --ignore tests/engine
    step "tests on several ranks" tests ranks "alone and not nightly" tests/engine
    step "kernels" end kernels
fi
seconds=$SECONDS
if [ $tier = nightly ]; then
    step "numerics with AVX2" scripts/with_isa.sh avx2 "$bin/python" -m pytest -n 2 \
        -m "not slow and not vllm and not alone and not nightly" \
        --junitxml "$scratch/avx2.xml" \
        tests/draft tests/demo tests/kernels tests/train
    VLLM_CPU_OMP_THREADS_BIND=nobind step "nightly tests" tests nightly \
        "nightly and not alone" -n 2 --dist loadscope
    step "nightly tests on servers" tests nightly_alone "nightly and alone"
    step "500 faults" scripts/faults.sh --count 500 --json "$scratch/faults.json"
    step "soak" scripts/soak.sh --minutes 20 --json "$scratch/soak.json"
    step "fuzz" scripts/fuzz.sh 5000
    step "sanitizers" scripts/sanitize.sh 1000
    seconds=$SECONDS
fi
if [ $tier = nightly ] || { [ $tier = all ] && patches_changed; }; then
    begin upstream scripts/upstream_tests.sh --subset
    step "vLLM's tests" end upstream
fi

echo "=== summary [${seconds}s after an install of ${install_seconds}s]"
[ ${#broken[@]} = 0 ] || printf 'broken: %s\n' "${broken[@]}"
"$bin/python" scripts/test_report.py "$scratch" --tier "$tier" --seconds "$seconds" \
    --install-seconds "$install_seconds" --broken "${#broken[@]}" ${json:+--json "$json"}
