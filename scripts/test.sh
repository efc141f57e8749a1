#!/usr/bin/env bash
# Installs everything, then checks everything; ends with a line 'N passed, N failed'.
#
#   scripts/test.sh [--fast]
#
#   --fast   no test that is slow or needs vLLM running, and not vLLM's own tests
#
# Environment: TIDE_VENV (default: .venv in the checkout) and what scripts/install.sh and
# scripts/upstream_tests.sh read.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export TIDE_VENV=${TIDE_VENV:-$here/.venv}
bin=$TIDE_VENV/bin
fast=0
case ${1:-} in
    --fast) fast=1 ;;
    '') ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
       case ${1:-} in -h | --help) exit 0 ;; esac; exit 2 ;;
esac
cd "$here"
exec < /dev/null
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

# What vLLM's tests and ours print goes to the terminal; only the counts are collected.
scratch=$(mktemp -d)
broken=()
declare -A beside=()
trap 'exit 130' INT
trap 'kill -- "${beside[@]/#/-}" 2> /dev/null || :; rm -rf "$scratch"' EXIT

step() {
    local name=$1
    shift
    echo "=== $name [${SECONDS}s]"
    "$@" || broken+=("$name")
}

# begin NAME COMMAND: beside the next steps, on what they leave of the cores. Servers have
# sessions of their own, against which the niceness of a session may count.
begin() {
    local name=$1
    shift
    setsid nice -n 19 sh -c '{ echo 19 > /proc/self/autogroup; } 2> /dev/null; exec "$@"' \
        sh "$@" > "$scratch/$name.txt" 2>&1 &
    beside[$name]=$!
}

# end NAME: wait for it and print all it said.
end() {
    local code=0
    wait "${beside[$1]}" || code=$?
    unset "beside[$1]"
    cat "$scratch/$1.txt"
    return "$code"
}

scripts/install.sh --venv "$TIDE_VENV" --dev
step "ruff check" "$bin/ruff" check .
step "ruff format" "$bin/ruff" format --check .
begin mypy "$bin/mypy"
step "patch check" "$bin/vllm-tide" patch check
step "fast tests" env OMP_NUM_THREADS=1 "$bin/python" -m pytest -n 2 \
    -m "not slow and not vllm and not nightly" --durations=15 --junitxml "$scratch/fast.xml"
# What kernels compute, as an older CPU computes it.
step "numerics with AVX2" env OMP_NUM_THREADS=1 scripts/with_isa.sh avx2 \
    "$bin/python" -m pytest -n 2 -m "not slow and not alone and not nightly" --junitxml "$scratch/avx2.xml" \
    tests/draft tests/demo tests/kernels/test_{kl_loss,sureness,topk_teacher}.py \
    tests/engine/test_seeded.py tests/train/test_{architectures,branches,learning}.py \
    tests/train/test_{loss_terms,losses,trainer}.py
if [ $fast = 0 ]; then
    # Engines wait in between: three at once fill two cores. Bound to cores by vLLM they
    # would share one.
    step "tests on vLLM" env OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
        "$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
        -m "(slow or vllm) and not alone and not nightly" --durations=15 --junitxml "$scratch/slow.xml"
    # On what the next step leaves of the cores. Kernels under Triton's interpreter share
    # one process.
    begin upstream scripts/upstream_tests.sh --subset
    begin kernels env OMP_NUM_THREADS=1 "$bin/python" -m pytest \
        tests/kernels -m "alone and not nightly" --junitxml "$scratch/kernels.xml"
    # One after the other: ranks that wait for each other, servers and trainers.
    step "tests on all cores" env OMP_NUM_THREADS=1 "$bin/python" -m pytest \
        tests/e2e tests/engine -m "alone and not nightly" --durations=5 --junitxml "$scratch/alone.xml"
    step "kernels" end kernels
    step "vLLM's own tests" end upstream
fi
step "mypy" end mypy

echo "=== summary [${SECONDS}s]"
[ ${#broken[@]} = 0 ] || printf 'broken: %s\n' "${broken[@]}"
"$bin/python" - "$scratch" "${#broken[@]}" <<'PY'
import re, sys
import xml.etree.ElementTree as ET
from pathlib import Path

scratch, broken = Path(sys.argv[1]), int(sys.argv[2])
passed = failed = skipped = 0
for report in scratch.glob("*.xml"):
    for suite in ET.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skips = int(suite.get("skipped", 0))
        failed, skipped = failed + bad, skipped + skips
        passed += int(suite.get("tests", 0)) - bad - skips
if (scratch / "upstream.txt").is_file():
    found = re.search(
        r"^upstream tests: (\d+) passed, (\d+) failed",
        (scratch / "upstream.txt").read_text(),
        re.M,
    )
    if found:
        passed, failed = passed + int(found[1]), failed + int(found[2])
if broken and not failed:
    failed = broken
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if broken else 0)
PY
