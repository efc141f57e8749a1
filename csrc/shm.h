// What Python cannot do for the shared-memory transport: exclusive segments, atomic
// words and checksummed copies. No Python and no Torch here; bindings.cpp wraps it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// CRC-32C (Castagnoli, reflected 0x82F63B78, as in iSCSI). `crc` is the value of
// the bytes before these (0 at the start).
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// The portable slicing-by-8 version; tests compare the two.
uint32_t crc32c_table(uint32_t crc, const void* data, size_t size);

// True when crc32c() runs on the processor's own instruction.
bool crc32c_is_hardware();

// memcpy that also extends `crc` over the bytes AS THEY WERE READ from `source`
// and written to `target`; the checksum is taken of `target`, block by block,
// while the block is in the cache. The ranges must not overlap; the same range, which
// a GPU wrote by itself, is only checked.
uint32_t copy_crc32c(uint32_t crc, void* target, const void* source, size_t size);

// POSIX shared memory. All return -1 with errno on failure (EINTR is retried).
// create: exclusive, mode exactly 0600, close-on-exec, `size` bytes really
// allocated, so that a full /dev/shm is an error here and not a SIGBUS later.
int create_segment(const char* name, int64_t size);
int open_segment(const char* name);
int unlink_segment(const char* name);
int64_t descriptor_size(int fd);

// Words of 8 bytes shared between processes. `address` must be 8-byte aligned.
uint64_t load_acquire(const void* address);
void store_release(void* address, uint64_t value);
uint64_t fetch_add(void* address, uint64_t delta);
bool compare_exchange(void* address, uint64_t expected, uint64_t desired);

}  // namespace tide
