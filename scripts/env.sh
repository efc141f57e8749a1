# Source this file before serving on a CPU:  source scripts/env.sh
#
# Preloads Intel OpenMP, for which vLLM's CPU kernels are tuned, and tcmalloc if it is
# installed (Debian: libtcmalloc-minimal4; without it vLLM logs a warning), for speed; an
# existing LD_PRELOAD is kept after them. Variables that are set already keep their
# values. Works in bash, zsh and POSIX shells.

_tide_venv=${TIDE_VENV:-${VIRTUAL_ENV:-}}
if [ -z "$_tide_venv" ]; then
    _tide_venv=$(cd "$(dirname "${BASH_SOURCE:-$0}")/.." && pwd)/.venv
fi

[ -x "$_tide_venv/bin/vllm" ] ||
    echo "env.sh: no vllm in $_tide_venv; export TIDE_VENV with the folder of install.sh --venv" >&2

_tide_preload=
for _tide_library in \
    "$_tide_venv/lib/libiomp5.so" \
    /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 \
    /usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 \
    /usr/lib64/libtcmalloc_minimal.so.4; do
    case $_tide_library:$_tide_preload in
        *tcmalloc*:*tcmalloc*) continue ;;
    esac
    if [ -f "$_tide_library" ]; then
        _tide_preload=${_tide_preload:+$_tide_preload:}$_tide_library
    fi
done
case ${LD_PRELOAD:-} in
    *libiomp5*) ;;
    *) [ -z "$_tide_preload" ] || export LD_PRELOAD="$_tide_preload${LD_PRELOAD:+:$LD_PRELOAD}" ;;
esac

export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GiB
export PATH="$_tide_venv/bin:$PATH"
unset _tide_venv _tide_preload _tide_library
