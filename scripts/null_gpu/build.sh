#!/usr/bin/env bash
# Compile the null GPU: CUDA's runtime, driver and NVML with kernels that do nothing.
#
#   scripts/null_gpu/build.sh SITE_PACKAGES OUT
#
#   SITE_PACKAGES    site-packages with the CUDA build of torch, for its headers
#   OUT              folder for the libraries
set -euo pipefail

site=$1 out=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$out"
headers=(-I"$site/nvidia/cu13/include" -I"$site/triton/backends/nvidia/include")
gcc=(gcc -O1 -w -fPIC -shared "${headers[@]}")

# Calls that only succeed, one a line.
stubs() { sed -nE "s/^$1 (.*)/int \1(void) { return 0; }/p" "$here/stubs.txt"; }
stubs runtime > "$out/runtime_stubs.c"
stubs driver > "$out/driver_stubs.c"
"${gcc[@]}" -o "$out/nullrt.so" "$here/runtime.c" "$out/runtime_stubs.c" -ldl -lpthread
"${gcc[@]}" -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" \
    "$here/driver.c" "$out/driver_stubs.c" -ldl
"${gcc[@]}" -Wl,-soname,libnvidia-ml.so.1 -o "$out/libnvidia-ml.so.1" "$here/nvml.c"
