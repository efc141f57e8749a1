/* A CUDA driver without a GPU, beside runtime.c: launches are counted, modules are empty. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *ng_malloc(size_t) __attribute__((weak));
extern int ng_free(void *) __attribute__((weak));
extern int ng_attribute(int) __attribute__((weak));
extern size_t ng_free_bytes(void) __attribute__((weak));
extern int ng_is_device(const void *) __attribute__((weak));

const char *ng_driver_names = "driver_launches";
unsigned long ng_driver_counts[1];

static int launched(void) {
    __atomic_add_fetch(&ng_driver_counts[0], 1, __ATOMIC_RELAXED);
    return 0;
}
int cuLaunchKernel(void) { return launched(); }
int cuLaunchKernelEx(void) { return launched(); }
int cuLaunchCooperativeKernel(void) { return launched(); }

static int handle(void **result) {
    *result = calloc(1, 64);
    return 0;
}
static const size_t TOTAL = (size_t)143771 << 20;
static void *const CONTEXT = (void *)0x1000;
static __thread int device;

static int count(void) {
    const char *text = getenv("NULL_GPU_COUNT");
    return text ? atoi(text) : 1;
}

int ng_success(void) { return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = count(); return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int *v, int name, int d) {
    *v = ng_attribute ? ng_attribute(name) : 1;
    return 0;
}
int cuDeviceGetName(char *text, int size, int d) {
    snprintf(text, size, "NVIDIA H200");
    return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = TOTAL; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = CONTEXT; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxGetCurrent(void **c) { *c = CONTEXT; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxGetDevice(int *d) { *d = device; return 0; }
int cuCtxGetLimit(size_t *v, int name) { *v = 1024; return 0; }
int cuModuleLoadData(void **m, const void *image) { return handle(m); }
int cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *o, void *v) {
    return handle(m);
}
int cuModuleLoad(void **m, const char *file) { return handle(m); }
int cuLibraryLoadData(void **m, const void *image, void *a, void *b, unsigned n, void *c,
                      void *d, unsigned k) {
    return handle(m);
}
int cuModuleGetFunction(void **f, void *m, const char *name) { return handle(f); }
int cuModuleGetGlobal_v2(void **p, size_t *n, void *m, const char *name) {
    *p = ng_malloc(4096);
    if (n) *n = 4096;
    return 0;
}
int cuFuncGetAttribute(int *v, int name, void *f) {
    *v = name == 0 ? 1024 : name == 4 ? 32 : 0;
    return 0;
}
int cuFuncSetAttribute(void *f, int name, int v) { return 0; }
int cuFuncSetCacheConfig(void *f, int c) { return 0; }
int cuGetErrorString(int e, const char **text) { *text = "null GPU"; return 0; }
int cuGetErrorName(int e, const char **text) { *text = "null GPU"; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 66; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) {
    *n = 1;
    return 0;
}
int cuPointerGetAttribute(void *result, int name, uintptr_t p) {
    if (name == 3) *(uintptr_t *)result = p;
    else if (name == 2) *(unsigned *)result = ng_is_device && ng_is_device((void *)p) ? 2 : 1;
    else if (name == 9) *(int *)result = 0;
    else *(uintptr_t *)result = 0;
    return 0;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *free_bytes = ng_free_bytes();
    *total = TOTAL;
    return 0;
}
int cuMemAlloc_v2(void **p, size_t n) { *p = ng_malloc(n); return 0; }
int cuMemFree_v2(void *p) { return ng_free(p); }
int cuMemGetAddressRange_v2(uintptr_t *at, size_t *n, uintptr_t p) {
    *at = p;
    *n = 1 << 20;
    return 0;
}
int cuMemGetAllocationGranularity(size_t *g, void *p, int o) { *g = 2 << 20; return 0; }
int cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return 0; }
int cuTensorMapEncodeIm2col(void *map) { memset(map, 0, 128); return 0; }
int cuStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
int cuGetProcAddress_v2(const char *name, void **f, int v, uint64_t flags, void *result) {
    *f = dlsym(RTLD_DEFAULT, name);
    if (!*f) {
        char longer[256];
        snprintf(longer, sizeof longer, "%s_v2", name);
        *f = dlsym(RTLD_DEFAULT, longer);
    }
    if (!*f) *f = (void *)ng_success;
    if (result) *(int *)result = 0;
    return 0;
}
int cuGetProcAddress(const char *name, void **f, int v, uint64_t flags) {
    return cuGetProcAddress_v2(name, f, v, flags, 0);
}
