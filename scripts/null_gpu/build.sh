#!/usr/bin/env bash
# Compile the null GPU with call counters.
#
#   scripts/null_gpu/build.sh NULL_GPU SITE_PACKAGES OUT
#
#   NULL_GPU         folder of its sources (nullrt.c, drv.c, ...)
#   SITE_PACKAGES    site-packages with the CUDA build of torch, for its headers
#   OUT              folder for the libraries
set -euo pipefail

null=$1 site=$2 out=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$out"
headers=(-I"$site/nvidia/cu13/include" -I"$site/triton/backends/nvidia/include")
gcc=(gcc -O1 -w -fPIC "${headers[@]}")

# Rename every call that counters.c defines in the null GPU.
renamed() { sed -nE "s/^$1\(((__)?cu[A-Za-z0-9]+).*/-D\1=ng_real_\1/p" "$here/counters.c"; }
mapfile -t runtime < <(renamed WRAP)
mapfile -t driver < <(renamed LAUNCH)

for part in nullrt gen; do
    "${gcc[@]}" "${runtime[@]}" -c -o "$out/$part.o" "$null/$part.c"
done
"${gcc[@]}" -DRUNTIME -c -o "$out/counters.o" "$here/counters.c"
gcc -shared -o "$out/nullrt.so" "$out"/{nullrt,gen,counters}.o -ldl -lpthread

for part in drv dgen; do
    "${gcc[@]}" "${driver[@]}" -c -o "$out/$part.o" "$null/$part.c"
done
"${gcc[@]}" -c -o "$out/driver_counters.o" "$here/counters.c"
gcc -shared -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" \
    "$out"/{drv,dgen,driver_counters}.o -ldl
"${gcc[@]}" -shared -Wl,-soname,libnvidia-ml.so.1 -o "$out/libnvidia-ml.so.1" "$null/nvml.c"
rm -f "$out"/*.o
