#!/usr/bin/env bash
# Run a command as on an older x86-64 CPU: torch, oneDNN and vLLM do not use newer
# instructions.
#
#   scripts/with_isa.sh avx2|avx512_core|native COMMAND [ARGUMENT...]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -gt 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
case $1 in
    avx2) export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ;;
    avx512_core) export ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE ;;
    native) shift; exec "$@" ;;
    *) echo "with_isa.sh: $1 is neither avx2, avx512_core nor native." >&2; exit 2 ;;
esac
export TIDE_ISA=$1 PYTHONPATH=$here/isa${PYTHONPATH:+:$PYTHONPATH}
shift
exec "$@"
