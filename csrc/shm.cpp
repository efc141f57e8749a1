#include "shm.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <nmmintrin.h>
#define TIDE_SSE42 1
// Clang has a separate target feature for the crc instructions; old GCCs do not.
#if defined(__clang__)
#define TIDE_CRC __attribute__((target("sse4.2,crc32")))
#else
#define TIDE_CRC __attribute__((target("sse4.2")))
#endif
#else
#define TIDE_SSE42 0
#endif

namespace tide {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;

// The crc instruction has a latency of three cycles and a throughput of one: compute three
// independent streams of kStreamBytes and combine them by a linear map.
constexpr size_t kStreamBytes = 1024;
constexpr size_t kBlockBytes = 3 * kStreamBytes;

// A copied block stays in the L1 cache until its checksum is computed.
constexpr size_t kCopyBytes = 4 * kBlockBytes;

struct Tables {
  uint32_t slice[8][256];  // slicing-by-8
  uint32_t skip[4][256];   // effect of kStreamBytes zero bytes on a state, by byte

  Tables() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
      slice[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; ++i)
      for (int k = 1; k < 8; ++k) {
        const uint32_t c = slice[k - 1][i];
        slice[k][i] = (c >> 8) ^ slice[0][c & 0xFF];
      }
    uint32_t column[32];  // image of each single bit
    for (int bit = 0; bit < 32; ++bit) {
      uint32_t c = 1u << bit;
      for (size_t n = 0; n < kStreamBytes; ++n) c = (c >> 8) ^ slice[0][c & 0xFF];
      column[bit] = c;
    }
    for (int byte = 0; byte < 4; ++byte)
      for (uint32_t i = 0; i < 256; ++i) {
        uint32_t c = 0;
        for (int bit = 0; bit < 8; ++bit)
          if (i & (1u << bit)) c ^= column[8 * byte + bit];
        skip[byte][i] = c;
      }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

#if TIDE_SSE42
inline uint64_t word(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

inline uint32_t skip_stream(const Tables& t, uint32_t c) {
  return t.skip[0][c & 0xFF] ^ t.skip[1][(c >> 8) & 0xFF] ^
         t.skip[2][(c >> 16) & 0xFF] ^ t.skip[3][c >> 24];
}

TIDE_CRC uint32_t crc32c_sse42(uint32_t crc, const void* data, size_t size) {
  const Tables& t = tables();
  const uint8_t* p = static_cast<const uint8_t*>(data);
  uint64_t a = ~crc;
  for (; size >= kBlockBytes; size -= kBlockBytes, p += kBlockBytes) {
    uint64_t b = 0;
    uint64_t c = 0;
    for (size_t i = 0; i < kStreamBytes; i += 8) {
      a = _mm_crc32_u64(a, word(p + i));
      b = _mm_crc32_u64(b, word(p + kStreamBytes + i));
      c = _mm_crc32_u64(c, word(p + 2 * kStreamBytes + i));
    }
    a = skip_stream(t, static_cast<uint32_t>(a)) ^ b;
    a = skip_stream(t, static_cast<uint32_t>(a)) ^ c;
  }
  for (; size >= 8; size -= 8, p += 8) a = _mm_crc32_u64(a, word(p));
  uint32_t tail = static_cast<uint32_t>(a);
  for (; size > 0; --size, ++p) tail = _mm_crc32_u8(tail, *p);
  return ~tail;
}
#endif

}  // namespace

uint32_t crc32c_table(uint32_t crc, const void* data, size_t size) {
  const Tables& t = tables();
  const uint8_t* p = static_cast<const uint8_t*>(data);
  uint32_t c = ~crc;
  for (; size >= 8; size -= 8, p += 8) {
    const uint32_t low = c ^ (uint32_t(p[0]) | uint32_t(p[1]) << 8 |
                              uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24);
    c = t.slice[7][low & 0xFF] ^ t.slice[6][(low >> 8) & 0xFF] ^
        t.slice[5][(low >> 16) & 0xFF] ^ t.slice[4][low >> 24] ^ t.slice[3][p[4]] ^
        t.slice[2][p[5]] ^ t.slice[1][p[6]] ^ t.slice[0][p[7]];
  }
  for (; size > 0; --size, ++p) c = (c >> 8) ^ t.slice[0][(c ^ *p) & 0xFF];
  return ~c;
}

bool crc32c_is_hardware() {
#if TIDE_SSE42
  // Not __builtin_cpu_supports: with zig, which builds the wheels, it returns false.
  static const bool available = [] {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) != 0;
  }();
  return available;
#else
  return false;
#endif
}

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
#if TIDE_SSE42
  if (crc32c_is_hardware()) return crc32c_sse42(crc, data, size);
#endif
  return crc32c_table(crc, data, size);
}

uint32_t copy_crc32c(uint32_t crc, void* target, const void* source, size_t size) {
  uint8_t* to = static_cast<uint8_t*>(target);
  const uint8_t* from = static_cast<const uint8_t*>(source);
  while (size > 0) {
    const size_t step = size < kCopyBytes ? size : kCopyBytes;
    if (to != from) std::memcpy(to, from, step);
    crc = crc32c(crc, to, step);
    to += step;
    from += step;
    size -= step;
  }
  return crc;
}

int create_segment(const char* name, int64_t size) {
  const int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  int error = 0;
  if (fchmod(fd, 0600) != 0) {  // independent of the umask
    error = errno;
  } else {
    do error = posix_fallocate(fd, 0, size);
    while (error == EINTR);
  }
  if (error == 0) return fd;
  close(fd);
  shm_unlink(name);
  errno = error;
  return -1;
}

int open_segment(const char* name) { return shm_open(name, O_RDWR | O_CLOEXEC, 0); }

int unlink_segment(const char* name) { return shm_unlink(name); }

int64_t descriptor_size(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) return -1;
  return status.st_size;
}

// GCC builtins instead of std::atomic: no objects are constructed in the shared memory.
uint64_t load_acquire(const void* address) {
  // The fence orders earlier copies before this load (end of a sequence lock).
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(static_cast<const uint64_t*>(address), __ATOMIC_ACQUIRE);
}

void store_release(void* address, uint64_t value) {
  __atomic_store_n(static_cast<uint64_t*>(address), value, __ATOMIC_RELEASE);
}

uint64_t fetch_add(void* address, uint64_t delta) {
  const uint64_t before =
      __atomic_fetch_add(static_cast<uint64_t*>(address), delta, __ATOMIC_SEQ_CST);
  // The fence orders later writes after this (start of a sequence lock).
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return before;
}

}  // namespace tide
