#!/usr/bin/env bash
# Run vLLM 0.32.0's tests on patched vLLM and compare with unpatched vLLM.
#
#   scripts/upstream_tests.sh [--subset | --all] [--group NAME ...] [--record-baseline]
#
#   --subset            the tests that CI runs (default)
#   --all               every test file for code that the patches change
#   --group NAME        only this group of scripts/upstream/run.py
#   --record-baseline   run on UNPATCHED vLLM and rewrite the results of the groups in
#                       tests/upstream/baseline.json.gz (--all unless --subset is given)
#
# Environment: PYTHON (default: the environment of scripts/install.sh --dev),
# TIDE_VLLM_ARCHIVES (folder for the downloaded sdist), TIDE_UPSTREAM_WORK (folder for
# the unpacked tests and the logs).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-${TIDE_VENV:-$here/.venv}/bin/python}
which=
record=()
groups=()

die() { echo "upstream_tests.sh: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
        --subset | --all) which=${1#--} ;;
        --record-baseline) record=(--record) ;;
        --group) [ $# -gt 1 ] || die "--group needs a name"; groups+=(--group "$2"); shift ;;
        *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
           case $1 in -h | --help) exit 0 ;; esac; exit 2 ;;
    esac
    shift
done

if [ -z "$which" ]; then
    which=subset
    [ ${#record[@]} = 0 ] && [ ${#groups[@]} = 0 ] || which=all
fi
state=$(PYTHONPATH=$here "$python" -m vllm_tide.cli.main patch status) || :
echo "$state"
if [ ${#record[@]} -gt 0 ]; then
    [[ $state = absent:* ]] || die "a baseline is recorded on unpatched vLLM only"
else
    [[ $state = applied:* ]] || die "vLLM is not patched: run 'vllm-tide patch apply'"
fi

if [ -n "${TIDE_UPSTREAM_WORK:-}" ]; then
    work=$TIDE_UPSTREAM_WORK
    mkdir -p "$work"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
if [ ! -d "$work/tests" ]; then
    sdist=$("$python" "$here/scripts/fetch_vllm.py" sdist "${TIDE_VLLM_ARCHIVES:-$work}" | tail -n 1)
    # Exclude its vllm/, which is not built and would shadow the installed one.
    tar -xzf "$sdist" -C "$work" --strip-components=1 --wildcards \
        'vllm-*/tests/*' 'vllm-*/pyproject.toml'
fi
"$python" "$here/scripts/upstream/stub_hf_configs.py" "$work/hf"
"$python" "$here/scripts/upstream/run.py" "$which" "$work" \
    "$here/tests/upstream/baseline.json.gz" "${record[@]}" "${groups[@]}"
