/* NVML without a GPU. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *gpu;
typedef struct { unsigned long long total, free, used; } memory;

static unsigned count(void) {
    const char *text = getenv("NULL_GPU_COUNT");
    return text ? atoi(text) : 1;
}

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return "null GPU"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count(); return 0; }
int nvmlDeviceGetCount(unsigned *n) { *n = count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, gpu *d) { *d = (gpu)(0x10 + (uintptr_t)i); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu *d) { *d = (gpu)0x10; return 0; }
int nvmlDeviceGetIndex(gpu d, unsigned *i) { *i = (uintptr_t)d - 0x10; return 0; }
int nvmlDeviceGetName(gpu d, char *text, unsigned n) {
    snprintf(text, n, "NVIDIA H200");
    return 0;
}
int nvmlDeviceGetUUID(gpu d, char *text, unsigned n) {
    snprintf(text, n, "GPU-00000000-0000-0000-0000-%012u", (unsigned)((uintptr_t)d - 0x0f));
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(gpu d, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(gpu d, memory *m) {
    *m = (memory){143771ULL << 20, 143000ULL << 20, 771ULL << 20};
    return 0;
}
int nvmlDeviceGetNumaNodeId(gpu d, unsigned *n) { *n = 0; return 0; }
int nvmlDeviceGetCpuAffinity(gpu d, unsigned n, unsigned long *mask) {
    memset(mask, 0, n * 8);
    mask[0] = 3;
    return 0;
}
int nvmlDeviceGetP2PStatus(gpu a, gpu b, int index, int *status) { *status = 1; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) {
    snprintf(text, n, "580.159.03");
    return 0;
}
