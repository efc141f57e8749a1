// Shared-memory operations that Python lacks: exclusive segments, atomic words, copies with
// checksum, and writing many records without the GIL. No Python or Torch here;
// bindings.cpp wraps it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// CRC-32C (Castagnoli, reflected 0x82F63B78, as in iSCSI). `crc` is the value of the
// preceding bytes (0 at the start).
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// The portable slicing-by-8 version; tests compare both.
uint32_t crc32c_table(uint32_t crc, const void* data, size_t size);

// Return whether crc32c() uses the CPU instruction.
bool crc32c_is_hardware();

// memcpy that also extends `crc` over the bytes AS WRITTEN to `target`: the checksum of
// `target` is computed block by block, while the block is in the cache. The ranges must
// not overlap, but may be identical: then nothing is copied and only the checksum is
// computed (data written by a GPU).
uint32_t copy_crc32c(uint32_t crc, void* target, const void* source, size_t size);

// POSIX shared memory. All return -1 with errno on failure (EINTR is retried).
// create: exclusive, mode exactly 0600, close-on-exec, with `size` bytes allocated, so
// that a full /dev/shm is an error here and not a SIGBUS later.
int create_segment(const char* name, int64_t size);
int open_segment(const char* name);
int unlink_segment(const char* name);
int64_t descriptor_size(int fd);

// Words of 8 bytes shared between processes. `address` must be 8-byte aligned.
uint64_t load_acquire(const void* address);
void store_release(void* address, uint64_t value);
uint64_t fetch_add(void* address, uint64_t delta);

// The ring; transport/ring.py describes the layout.
constexpr size_t kDataAt = 8192;
constexpr size_t kLineBytes = 64;
constexpr size_t kFrameBytes = 64;
constexpr size_t kMetaBytes = 96;

// Outcome of a record; before a call, kWritten marks a record to be written.
enum FrameStatus : uint8_t {
  kWritten = 0,
  kFull = 1,
  kTooLarge = 2,
  kCursor = 3,     // the consumer's cursor is damaged
  kTruncated = 4,  // the memory was truncated
  kSkipped = 5,    // it continues a record that was not written
};

struct Ring {
  uint8_t* memory;
  size_t size;
  int descriptor;
};

// Position of the producer, in private memory; other threads may read it.
struct RingEnd {
  uint64_t head;
  uint64_t tail;
};

struct Part {
  const uint8_t* data;
  size_t size;
};

struct Frames {
  size_t count;
  const uint8_t* metas;    // count * kMetaBytes
  const Part* parts;       // count * parts_each
  size_t parts_each;
  const uint8_t* follows;  // whether it continues the previous record
};

// Write records in order; the reader sees each one completely or not at all. Of the shared
// memory only the consumer's cursor is used, after a check of its bounds. `end` is as the
// previous call left it, initially 0; head and tail differ by at most the ring's capacity.
void write_frames(const Ring& ring, RingEnd* end, const Frames& frames, uint8_t* status);

}  // namespace tide
