/* A CUDA runtime without a GPU: memory, streams, events and graphs on the host.
 *
 * Kernels do nothing. Copies and memsets are executed: at once, or, with NULL_GPU_LATE=N,
 * at a random time that streams and events allow, at the latest at the N-th query of an
 * event behind them, so that a read before the event sees old data (NULL_GPU_SEED). Calls
 * that CUDA forbids during the capture of a graph fail and invalidate it, also from other
 * threads (NULL_GPU_DEBUG prints the Python stacks). NULL_GPU_COUNT is the number of
 * devices. `ng_counts` counts calls, with the names of `ng_names` (read by counts.py).
 * Other calls succeed: stubs.txt.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define API __attribute__((visibility("default")))
#define OK return cudaSuccess

/* Counters */

enum { LAUNCH, CAPTURED, GRAPH, H2D, D2H, D2D, PAGEABLE, REGISTERED, MEMSET, SYNC, ALLOC,
       FREE, RECORD, WAIT, QUERY, INSTANTIATE, FORBIDDEN, COUNTS };
API const char *ng_names = "launches captured_launches graph_launches copies_to_device "
    "copies_to_host copies_on_device pageable_copies copies_to_registered memsets "
    "synchronisations allocations frees event_records stream_waits event_queries graphs "
    "forbidden_calls";
API unsigned long ng_counts[COUNTS];

static void count(int what) { __atomic_add_fetch(&ng_counts[what], 1, __ATOMIC_RELAXED); }

/* Memory: each device has a range of addresses. */

#define MAX_DEVICES 8
#define ALIGN ((size_t)2 << 20)
static const uintptr_t BASE = 0x600000000000ULL;
static const size_t SPAN = 1ULL << 41, TOTAL = (size_t)143771 << 20;

typedef struct region { uintptr_t at; size_t size; int kind; struct region *next; } region;
enum { DEVICE, PINNED, MAPPED };
static region *regions[4096];  /* of devices, by address */
static region *host_regions;
static uintptr_t next_at[MAX_DEVICES];
static size_t used[MAX_DEVICES];
static __thread int device;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define LOCKED for (int once = (pthread_mutex_lock(&lock), 1); once; \
                    once = (pthread_mutex_unlock(&lock), 0))

static int num_devices(void) {
    const char *text = getenv("NULL_GPU_COUNT");
    int n = text ? atoi(text) : 1;
    return n < 1 ? 1 : n > MAX_DEVICES ? MAX_DEVICES : n;
}

static unsigned slot(uintptr_t at) { return (at / ALIGN) % 4096; }

API void *ng_malloc(size_t size) {
    void *result = 0;
    size = ((size ? size : 1) + ALIGN - 1) / ALIGN * ALIGN;
    LOCKED {
        if (!next_at[device]) next_at[device] = BASE + device * SPAN;
        uintptr_t at = next_at[device];
        void *got = mmap((void *)at, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        if (got != MAP_FAILED) {
            region *new = malloc(sizeof *new);
            *new = (region){at, size, DEVICE, regions[slot(at)]};
            regions[slot(at)] = new;
            next_at[device] += size + ALIGN;
            used[device] += size;
            result = got;
        }
    }
    return result;
}

API int ng_is_device(const void *at) {
    return (uintptr_t)at >= BASE && (uintptr_t)at < BASE + MAX_DEVICES * SPAN;
}

static int device_of(const void *at) { return ((uintptr_t)at - BASE) / SPAN; }

API int ng_free(void *at) {
    LOCKED {
        region **each = &regions[slot((uintptr_t)at)];
        while (*each && (*each)->at != (uintptr_t)at) each = &(*each)->next;
        if (*each) {
            region *old = *each;
            *each = old->next;
            munmap(at, old->size);
            used[device_of(at)] -= old->size;
            free(old);
        }
    }
    return 0;
}

API size_t ng_free_bytes(void) { return TOTAL - used[device] - ((size_t)600 << 20); }

static void add_host(void *at, size_t size, int kind) {
    LOCKED {
        region *new = malloc(sizeof *new);
        *new = (region){(uintptr_t)at, size ? size : 1, kind, host_regions};
        host_regions = new;
    }
}

static void remove_host(void *at) {
    LOCKED {
        region **each = &host_regions;
        while (*each && (*each)->at != (uintptr_t)at) each = &(*each)->next;
        if (*each) {
            region *old = *each;
            *each = old->next;
            free(old);
        }
    }
}

/* Kind of a host address; -1 if it is pageable. */
static int host_kind(const void *at) {
    int kind = -1;
    LOCKED {
        for (region *each = host_regions; each && kind < 0; each = each->next)
            if ((uintptr_t)at - each->at < each->size) kind = each->kind;
    }
    return kind;
}

/* Streams: operations in order. */

struct event;
typedef struct operation {
    enum { COPY, SET, CALL, AFTER } kind;
    void *to;
    const void *from;
    size_t size, rows, to_pitch, from_pitch;
    int value;
    cudaHostFn_t call;
    struct stream *other;  /* AFTER: wait until it has done `number` operations */
    unsigned long number;
    struct operation *next;
} operation;

typedef struct graph { operation *first, **last; } graph;

typedef struct stream {
    operation *first, **last;
    unsigned long queued, done;
    /* Capture */
    unsigned long long capture;
    graph *into;
    pthread_t thread;
    enum cudaStreamCaptureMode mode;
    int origin, invalid;
    struct stream *next;
} stream;

typedef struct event {
    stream *on;
    unsigned long number;
    int queries;
    unsigned long long capture;
    graph *into;
} event;

static stream defaults[MAX_DEVICES], *streams;
static unsigned long long captures;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static int late(void) {
    static int value = -1;
    if (value < 0) {
        const char *text = getenv("NULL_GPU_LATE"), *seed = getenv("NULL_GPU_SEED");
        value = text ? atoi(text) : 0;
        srandom(seed ? atoi(seed) : 0);
    }
    return value;
}

static stream *at_last(stream *s) {
    if (!s->last) {
        s->last = &s->first;
        LOCKED s->next = streams, streams = s;
    }
    return s;
}

static stream *stream_of(cudaStream_t handle) {
    return at_last((uintptr_t)handle < 16 ? &defaults[device] : (stream *)handle);
}

static void set(void *to, int value, size_t size) {
    /* Zeros of whole pages cost no memory. */
    uintptr_t at = (uintptr_t)to, first = (at + 4095) & ~4095UL, end = (at + size) & ~4095UL;
    if (value || size < (4 << 20) || !ng_is_device(to)) {
        memset(to, value, size);
        return;
    }
    memset(to, 0, first - at);
    madvise((void *)first, end - first, MADV_DONTNEED);
    memset((void *)end, 0, at + size - end);
}

static void execute(operation *op) {
    if (op->kind == COPY)
        for (size_t i = 0; i < op->rows; i++)
            memmove((char *)op->to + i * op->to_pitch,
                    (const char *)op->from + i * op->from_pitch, op->size);
    if (op->kind == SET) set(op->to, op->value, op->size);
    if (op->kind == CALL) op->call(op->to);
}

/* Execute the operations of a stream up to a number, and what they wait for. */
static void advance(stream *s, unsigned long number) {
    while (s->done < number && s->first) {
        operation *op = s->first;
        if (op->kind == AFTER) advance(op->other, op->number);
        if (s->first != op) continue;  /* a call has advanced it */
        s->first = op->next;
        if (!s->first) s->last = &s->first;
        s->done++;
        execute(op);
        free(op);
    }
}

/* Let time pass: now and then a stream executes some of its operations. */
static void progress(void) {
    if (!late()) return;
    for (stream *s = streams; s; s = s->next)
        if (random() % 64 == 0) advance(s, s->done + random() % (s->queued - s->done + 1));
}

static cudaError_t push(stream *s, operation op) {
    operation *new = malloc(sizeof op);
    LOCKED {
        *new = op;
        new->next = 0;
        if (s->into) {
            if (op.kind == AFTER) free(new);  /* graphs keep one order */
            else *s->into->last = new, s->into->last = &new->next;
        } else {
            *s->last = new;
            s->last = &new->next;
            s->queued++;
            if (late()) progress(); else advance(s, s->queued);
        }
    }
    OK;
}

/* Capture of graphs */

/* Return an error if CUDA forbids an unsafe call now; the captures become invalid. */
static cudaError_t unsafe(void) {
    cudaError_t error = cudaSuccess;
    if (thread_mode == cudaStreamCaptureModeRelaxed) return error;
    LOCKED {
        for (stream *s = streams; s; s = s->next) {
            if (!s->origin || s->mode == cudaStreamCaptureModeRelaxed) continue;
            int own = pthread_equal(s->thread, pthread_self());
            if (own || (s->mode == cudaStreamCaptureModeGlobal &&
                        thread_mode == cudaStreamCaptureModeGlobal)) {
                s->invalid = 1;
                count(FORBIDDEN);
                if (getenv("NULL_GPU_DEBUG")) raise(SIGUSR1);  /* see sitecustomize.py */
                error = cudaErrorStreamCaptureUnsupported;
            }
        }
    }
    return error;
}

#define SAFE do { cudaError_t e = unsafe(); if (e) return e; } while (0)

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    OK;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    stream *s = stream_of(handle);
    LOCKED {
        s->into = calloc(1, sizeof *s->into);
        s->into->last = &s->into->first;
        s->capture = ++captures;
        s->thread = pthread_self();
        s->mode = mode;
        s->origin = 1;
        s->invalid = 0;
    }
    OK;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *result) {
    stream *s = stream_of(handle);
    int invalid = s->invalid;
    LOCKED {
        unsigned long long capture = s->capture;
        *result = invalid ? 0 : (cudaGraph_t)s->into;
        for (stream *each = streams; each; each = each->next)
            if (each->capture == capture) each->capture = each->origin = 0, each->into = 0;
    }
    return invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(stream *s) {
    return !s->into ? cudaStreamCaptureStatusNone
         : s->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = status_of(stream_of(s));
    OK;
}

API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *into, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
    size_t *num) {
    stream *s = stream_of(handle);
    *status = status_of(s);
    if (id) *id = s->capture;
    if (into) *into = (cudaGraph_t)s->into;
    if (nodes) *nodes = 0;
    if (edges) *edges = 0;
    if (num) *num = 0;
    OK;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t of, cudaGraphNode_t *nodes, size_t *num) {
    if (!nodes) *num = 1;  /* not empty: it has kernels */
    OK;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *result, cudaGraph_t of,
                                     unsigned long long flags) {
    count(INSTANTIATE);
    *result = (cudaGraphExec_t)of;
    OK;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *result, cudaGraph_t of,
                                              unsigned long long flags) {
    return cudaGraphInstantiate(result, of, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t of, cudaStream_t s) {
    count(GRAPH);
    for (operation *op = of ? ((graph *)of)->first : 0; op; op = op->next)
        push(stream_of(s), *op);
    OK;
}

/* Kernels do nothing. */

static cudaError_t launched(cudaStream_t s) {
    count(stream_of(s)->into ? CAPTURED : LAUNCH);
    if (late()) LOCKED progress();
    OK;
}

API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args,
                                 size_t shared, cudaStream_t s) {
    return launched(s);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **args,
                                   size_t shared, cudaStream_t s) {
    return launched(s);
}

API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args,
                                            size_t shared, cudaStream_t s) {
    return launched(s);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *f,
                                    void **args) {
    return launched(how->stream);
}

/* Copies */

static void counted(const void *to, const void *from) {
    int in = ng_is_device(to), out = ng_is_device(from);
    count(in && out ? D2D : in ? H2D : D2H);
    if (out && !in && host_kind(to) == MAPPED) count(REGISTERED);
    /* Copies from or to pageable memory block the host or are staged. */
    if ((!in && host_kind(to) < 0) || (!out && host_kind(from) < 0)) count(PAGEABLE);
}

static cudaError_t copy(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                        size_t size, size_t rows, cudaStream_t handle) {
    stream *s = stream_of(handle);
    if (!size || !rows) OK;
    counted(to, from);
    push(s, (operation){.kind = COPY, .to = to, .from = from, .size = size, .rows = rows,
                        .to_pitch = to_pitch, .from_pitch = from_pitch});
    int pageable = (!ng_is_device(to) && host_kind(to) < 0) ||
                   (!ng_is_device(from) && host_kind(from) < 0);
    if (pageable && !s->into) LOCKED advance(s, s->queued);
    OK;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size,
                                enum cudaMemcpyKind kind, cudaStream_t s) {
    return copy(to, 0, from, 0, size, 1, s);
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from,
                                  size_t from_pitch, size_t size, size_t rows,
                                  enum cudaMemcpyKind kind, cudaStream_t s) {
    return copy(to, to_pitch, from, from_pitch, size, rows, s);
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                    size_t size, cudaStream_t s) {
    return copy(to, 0, from, 0, size, 1, s);
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    SAFE;
    count(SYNC);
    copy(to, 0, from, 0, size, 1, 0);
    LOCKED advance(stream_of(0), stream_of(0)->queued);
    OK;
}

API cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t size, size_t at,
                                   enum cudaMemcpyKind kind) { OK; }

API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t s) {
    count(MEMSET);
    return push(stream_of(s),
                (operation){.kind = SET, .to = to, .value = value, .size = size});
}

API cudaError_t cudaMemset(void *to, int value, size_t size) {
    SAFE;
    cudaMemsetAsync(to, value, size, 0);
    LOCKED advance(stream_of(0), stream_of(0)->queued);
    OK;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) {
    return push(stream_of(s), (operation){.kind = CALL, .call = call, .to = data});
}

/* Events and waits */

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *result, unsigned flags) {
    *result = (cudaEvent_t)calloc(1, sizeof(event));
    OK;
}

API cudaError_t cudaEventCreate(cudaEvent_t *result) {
    return cudaEventCreateWithFlags(result, 0);
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
    event *e = (event *)handle;
    count(RECORD);
    LOCKED {
        stream *s = stream_of(on);
        *e = (event){s, s->queued, 0, s->capture, s->into};
        if (s->into) e->number = s->done;
        progress();
    }
    OK;
}

API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    return cudaEventRecordWithFlags(e, s, 0);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned flags) {
    stream *s = stream_of(handle);
    event *e = (event *)of;
    count(WAIT);
    LOCKED {
        if (e->into && !s->into) {  /* the stream joins the capture */
            s->capture = e->capture;
            s->into = e->into;
        }
        if (e->on && e->on != s && !s->into)
            push(s, (operation){.kind = AFTER, .other = e->on, .number = e->number});
    }
    OK;
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    event *e = (event *)handle;
    int done = 1;
    count(QUERY);
    SAFE;
    LOCKED {
        progress();
        if (e->on && ++e->queries >= late()) advance(e->on, e->number);
        done = !e->on || e->on->done >= e->number;
    }
    return done ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    event *e = (event *)handle;
    count(SYNC);
    SAFE;
    if (e->on) LOCKED advance(e->on, e->number);
    OK;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    stream *s = stream_of(handle);
    count(SYNC);
    SAFE;
    LOCKED advance(s, s->queued);
    OK;
}

API cudaError_t cudaStreamQuery(cudaStream_t s) {
    SAFE;
    LOCKED advance(stream_of(s), stream_of(s)->queued);
    OK;
}

API cudaError_t cudaDeviceSynchronize(void) {
    count(SYNC);
    SAFE;
    LOCKED for (stream *s = streams; s; s = s->next) advance(s, s->queued);
    OK;
}

/* Any two events are a millisecond apart. */
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = 1.0f;
    OK;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *result, unsigned flags, int priority) {
    *result = (cudaStream_t)at_last(calloc(1, sizeof(stream)));
    OK;
}

API cudaError_t cudaStreamCreate(cudaStream_t *result) {
    return cudaStreamCreateWithPriority(result, 0, 0);
}

API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; OK; }

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    OK;
}

/* Allocation */

API cudaError_t cudaMalloc(void **result, size_t size) {
    SAFE;
    count(ALLOC);
    return (*result = ng_malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaMallocAsync(void **result, size_t size, cudaStream_t s) {
    count(ALLOC);
    return (*result = ng_malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaFree(void *at) {
    if (!at) OK;
    SAFE;
    count(FREE);
    cudaDeviceSynchronize();
    ng_free(at);
    OK;
}

API cudaError_t cudaFreeAsync(void *at, cudaStream_t s) { return cudaFree(at); }

API cudaError_t cudaHostAlloc(void **result, size_t size, unsigned flags) {
    SAFE;
    count(ALLOC);
    if (posix_memalign(result, 4096, size ? size : 1)) return cudaErrorMemoryAllocation;
    memset(*result, 0, size);
    add_host(*result, size, PINNED);
    OK;
}

API cudaError_t cudaFreeHost(void *at) {
    SAFE;
    count(FREE);
    remove_host(at);
    free(at);
    OK;
}

API cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) {
    SAFE;
    count(ALLOC);
    add_host(at, size, MAPPED);
    OK;
}

API cudaError_t cudaHostUnregister(void *at) { remove_host(at); OK; }

API cudaError_t cudaHostGetDevicePointer(void **result, void *at, unsigned flags) {
    *result = at;
    OK;
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = ng_free_bytes();
    *total = TOTAL;
    OK;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *result, const void *at) {
    memset(result, 0, sizeof *result);
    if (ng_is_device(at)) {
        result->type = cudaMemoryTypeDevice;
        result->device = device_of(at);
        result->devicePointer = (void *)at;
    } else if (host_kind(at) >= 0) {
        result->type = cudaMemoryTypeHost;
        result->device = device;
        result->hostPointer = result->devicePointer = (void *)at;
    } else {
        result->type = cudaMemoryTypeUnregistered;
    }
    OK;
}

API cudaError_t cudaGetSymbolAddress(void **result, const void *symbol) {
    static void *block;
    if (!block) block = ng_malloc(1 << 20);
    *result = block;
    OK;
}

/* Devices: those of an H200. */

static const int ATTRIBUTES[][2] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrTotalConstantMemory, 65536}, {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMultiProcessorCount, 132}, {36 /* memory clock */, 3201000},
    {cudaDevAttrGlobalMemoryBusWidth, 6144}, {cudaDevAttrL2CacheSize, 60 << 20},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
};

API int ng_attribute(int name) {
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
        if (ATTRIBUTES[i][0] == name) return ATTRIBUTES[i][1];
    return 1;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int of) {
    *value = ng_attribute(name);
    OK;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int of) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H200");
    memcpy(p->uuid.bytes, "null GPU", 8);
    p->uuid.bytes[15] = of + 1;
    p->totalGlobalMem = TOTAL;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->memoryBusWidth = 6144;
    p->l2CacheSize = 60 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 233472;
    p->sharedMemPerBlockOptin = 232448;
    p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->asyncEngineCount = 3;
    p->textureAlignment = 512;
    p->maxBlocksPerMultiProcessor = 32;
    p->reservedSharedMemPerBlock = 1024;
    p->pciBusID = of + 1;
    OK;
}

API cudaError_t cudaGetDeviceCount(int *n) { *n = num_devices(); OK; }
API cudaError_t cudaGetDevice(int *of) { *of = device; OK; }
API cudaError_t cudaSetDevice(int of) {
    if (of < 0 || of >= num_devices()) return cudaErrorInvalidDevice;
    device = of;
    OK;
}
API cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; OK; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; OK; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; OK; }
API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int of) {
    snprintf(text, size, "00000000:%02x:00.0", of + 1);
    OK;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int of) {
    *pool = (cudaMemPool_t)0x1234;
    OK;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name,
                                        void *value) {
    *(unsigned long long *)value = 0;
    OK;
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = 90;
    a->maxDynamicSharedSizeBytes = 232448;
    OK;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block,
                                                              size_t shared) {
    *n = 1;
    OK;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int block, size_t shared, unsigned flags) {
    *n = 1;
    OK;
}
API const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorStreamCaptureUnsupported
               ? "operation not permitted when stream is capturing (null GPU)"
               : "error of the null GPU";
}
API const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }

API cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **result, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *result = driver ? dlsym(driver, name) : 0;
    if (!*result && driver) *result = dlsym(driver, "ng_success");
    if (found)
        *found = *result ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    OK;
}
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **result,
                                        unsigned long long flags,
                                        enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion(name, result, 13000, flags, found);
}

/* Registration of the kernels of a library */

API void **__cudaRegisterFatBinary(void *of) {
    static void *handle[4];
    return handle;
}
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, void *s) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *n, void *s) {
    memset(g, 0, sizeof *g);
    memset(b, 0, sizeof *b);
    *n = 0;
    *(void **)s = 0;
    OK;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) {
    *kernel = (cudaKernel_t)f;
    OK;
}

/* Libraries: what must return more than success */

static int handle(void **result) {
    *result = calloc(1, 1024);
    return 0;
}
API int cublasCreate_v2(void **h) { return handle(h); }
API int cublasLtCreate(void **h) { return handle(h); }
API int cublasLtMatmulDescCreate(void **h, int a, int b) { return handle(h); }
API int cublasLtMatrixLayoutCreate(void **h, int t, unsigned long r, unsigned long c, long l) {
    return handle(h);
}
API int cublasLtMatmulPreferenceCreate(void **h) { return handle(h); }
API int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f,
                                       void *g, int n, void *results, int *found) {
    *found = 1;
    memset(results, 0, 80);
    return 0;
}
API size_t cublasLtGetVersion(void) { return 130100; }
API int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
API const char *cublasGetStatusString(int status) { return "null GPU"; }

static int world_size = 1, world_rank;
API int ncclGetVersion(int *v) { *v = 22907; return 0; }
API int ncclCommInitRankConfig(void **comm, int n, char id[128], int rank, void *config) {
    world_size = n;
    world_rank = rank;
    return handle(comm);
}
API int ncclCommInitRank(void **comm, int n, char id[128], int rank) {
    return ncclCommInitRankConfig(comm, n, id, rank, 0);
}
API int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
API int ncclCommCount(void *comm, int *n) { *n = world_size; return 0; }
API int ncclCommUserRank(void *comm, int *rank) { *rank = world_rank; return 0; }
API const char *ncclGetErrorString(int e) { return "null GPU"; }
API const char *ncclGetLastError(void *comm) { return "null GPU"; }
