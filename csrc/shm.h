// What Python cannot do for the shared-memory transport: exclusive segments, atomic
// words, checksummed copies, and writing many records without the interpreter lock. No
// Python and no Torch here; bindings.cpp wraps it.
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

// The ring, of which transport/ring.py says what lies where.
constexpr size_t kDataAt = 8192;
constexpr size_t kLineBytes = 64;
constexpr size_t kFrameBytes = 64;
constexpr size_t kMetaBytes = 96;

// What became of a record; before a call, kWritten is one that is to be written.
enum FrameStatus : uint8_t {
  kWritten = 0,
  kFull = 1,
  kTooLarge = 2,
  kCursor = 3,     // the consumer's cursor is damaged
  kTruncated = 4,  // the memory was cut short
  kSkipped = 5,    // it continues one that was not written
};

struct Ring {
  uint8_t* memory;
  size_t size;
  int descriptor;
};

// Where the producer is, in memory of its own; other threads may look.
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
  const uint8_t* follows;  // whether it continues the one before
};

// Write records one after another, each seen by the reader as a whole or not at all.
// Of the ring's memory only the consumer's cursor is believed, and that within bounds.
// `end` is as a call left it, at first 0: at most the room for frames apart, whole lines.
void write_frames(const Ring& ring, RingEnd* end, const Frames& frames, uint8_t* status);

}  // namespace tide
