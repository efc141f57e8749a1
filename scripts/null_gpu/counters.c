/* Count calls of the null GPU's runtime and driver.
 *
 * The null GPU is compiled with -Dcall=ng_real_call for every call below, and linked with
 * this file, which defines the calls. RUNTIME selects the calls of the runtime, otherwise
 * those of the driver. Read `ng_counts` with ctypes; `ng_names` has the names in order.
 */
#include <cuda_runtime_api.h>

#define X __attribute__((visibility("default")))

#ifdef RUNTIME
enum { LAUNCH, CAPTURED, GRAPH, H2D, D2H, D2D, PAGEABLE, REGISTERED, MEMSET, SYNC, ALLOC,
       FREE, RECORD, WAIT, QUERY, INSTANTIATE, COUNTS };
X const char *ng_names = "launches captured_launches graph_launches copies_to_device "
    "copies_to_host copies_on_device pageable_copies copies_to_registered memsets "
    "synchronisations allocations frees event_records stream_waits event_queries graphs";
X unsigned long ng_counts[COUNTS];
static int capturing;

static void count(int what) {
    if (what == LAUNCH && capturing) what = CAPTURED;
    __atomic_add_fetch(&ng_counts[what], 1, __ATOMIC_RELAXED);
}

static int kind(const void *p) {
    struct cudaPointerAttributes a;
    cudaPointerGetAttributes(&a, p);
    return a.type;
}

/* Host memory passed to cudaHostRegister; the engine never unregisters it. */
static struct { const char *at; size_t size; } regions[64];
static int num_regions;

static void add_region(const char *at, size_t size) {
    if (num_regions < 64) regions[num_regions].at = at, regions[num_regions++].size = size;
}

static int registered(const char *p) {
    for (int i = 0; i < num_regions; i++)
        if (p >= regions[i].at && p < regions[i].at + regions[i].size) return 1;
    return 0;
}

static void copied(const void *to, const void *from) {
    int a = kind(to), b = kind(from);
    int in = a == cudaMemoryTypeDevice, out = b == cudaMemoryTypeDevice;
    count(in && out ? D2D : in ? H2D : D2H);
    if (out && !in && registered(to)) count(REGISTERED);
    /* Copies from or to pageable memory block the host or are staged. */
    if (a == cudaMemoryTypeUnregistered || b == cudaMemoryTypeUnregistered) count(PAGEABLE);
}

#define WRAP(name, args, pass, what)               \
    extern cudaError_t ng_real_##name args;        \
    X cudaError_t name args { what; return ng_real_##name pass; }

WRAP(cudaLaunchKernel, (const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s),
     (f, g, b, a, m, s), count(LAUNCH))
WRAP(cudaLaunchKernelExC, (const cudaLaunchConfig_t *c, const void *f, void **a), (c, f, a),
     count(LAUNCH))
/* Called by <<<>>>. */
WRAP(__cudaLaunchKernel,
     (cudaKernel_t f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s), (f, g, b, a, m, s),
     count(LAUNCH))
WRAP(cudaLaunchCooperativeKernel,
     (const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s), (f, g, b, a, m, s),
     count(LAUNCH))
WRAP(cudaGraphLaunch, (cudaGraphExec_t g, cudaStream_t s), (g, s), count(GRAPH))
WRAP(cudaGraphInstantiate, (cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f),
     (e, g, f), count(INSTANTIATE))
WRAP(cudaGraphInstantiateWithFlags, (cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f),
     (e, g, f), count(INSTANTIATE))
WRAP(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode m), (s, m),
     capturing++)
WRAP(cudaStreamEndCapture, (cudaStream_t s, cudaGraph_t *g), (s, g), capturing--)
WRAP(cudaMemcpy, (void *d, const void *s, size_t n, enum cudaMemcpyKind k), (d, s, n, k),
     copied(d, s); count(SYNC))
WRAP(cudaMemcpyAsync,
     (void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t),
     (d, s, n, k, t), copied(d, s))
WRAP(cudaMemcpy2DAsync,
     (void *d, size_t p, const void *s, size_t q, size_t w, size_t h, enum cudaMemcpyKind k,
      cudaStream_t t), (d, p, s, q, w, h, k, t), copied(d, s))
WRAP(cudaMemset, (void *d, int v, size_t n), (d, v, n), count(MEMSET))
WRAP(cudaMemsetAsync, (void *d, int v, size_t n, cudaStream_t s), (d, v, n, s), count(MEMSET))
WRAP(cudaStreamSynchronize, (cudaStream_t s), (s), count(SYNC))
WRAP(cudaDeviceSynchronize, (void), (), count(SYNC))
WRAP(cudaEventSynchronize, (cudaEvent_t e), (e), count(SYNC))
WRAP(cudaMalloc, (void **p, size_t n), (p, n), count(ALLOC))
WRAP(cudaMallocAsync, (void **p, size_t n, cudaStream_t s), (p, n, s), count(ALLOC))
WRAP(cudaHostAlloc, (void **p, size_t n, unsigned f), (p, n, f), count(ALLOC))
WRAP(cudaHostRegister, (void *p, size_t n, unsigned f), (p, n, f),
     count(ALLOC); add_region(p, n))
WRAP(cudaFree, (void *p), (p), count(FREE))
WRAP(cudaFreeHost, (void *p), (p), count(FREE))
WRAP(cudaEventRecord, (cudaEvent_t e, cudaStream_t s), (e, s), count(RECORD))
WRAP(cudaEventRecordWithFlags, (cudaEvent_t e, cudaStream_t s, unsigned f), (e, s, f),
     count(RECORD))
WRAP(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned f), (s, e, f), count(WAIT))
WRAP(cudaEventQuery, (cudaEvent_t e), (e), count(QUERY))
#else
X const char *ng_driver_names = "driver_launches";
X unsigned long ng_driver_counts[1];
#define LAUNCH(name)                                                    \
    extern int ng_real_##name(void);                                    \
    X int name(void) {                                                  \
        __atomic_add_fetch(&ng_driver_counts[0], 1, __ATOMIC_RELAXED);  \
        return ng_real_##name();                                        \
    }
LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernelEx)
LAUNCH(cuLaunchCooperativeKernel)
#endif
