// The producer of the ring; transport/ring.py describes the layout.
#include <cstring>

#include "shm.h"

namespace tide {
namespace {

constexpr uint32_t kMagic = 0x45444954;  // "TIDE"
constexpr uint16_t kRecord = 1;
constexpr uint16_t kPad = 2;

constexpr size_t kHeadAt = 4096;
constexpr size_t kTailAt = 4096 + 6 * kLineBytes;

// Alignment of the parts of a body (bytes).
constexpr size_t kPartAlign = 8;

size_t up(size_t size, size_t step) { return (size + step - 1) / step * step; }

class Writer {
 public:
  Writer(const Ring& ring, RingEnd* end)
      : memory_(ring.memory),
        capacity_(ring.size - kDataAt),
        size_(ring.size),
        descriptor_(ring.descriptor),
        head_(load_acquire(&end->head)),
        tail_(load_acquire(&end->tail)),
        end_(end) {}

  FrameStatus write(const uint8_t* meta, const Part* parts, size_t num_parts) {
    // Check before each record: a write to truncated memory raises SIGBUS.
    if (descriptor_size(descriptor_) < static_cast<int64_t>(size_)) return kTruncated;
    size_t body = kMetaBytes;
    for (size_t i = 0; i < num_parts; ++i) body += up(parts[i].size, kPartAlign);
    const size_t length = up(kFrameBytes + body, kLineBytes);
    const FrameStatus status = make_room(length);
    if (status != kWritten) return status;
    static const uint8_t zeros[kPartAlign] = {};
    uint8_t* at = memory_ + kDataAt + head_ % capacity_ + kFrameBytes;
    uint32_t crc = copy_crc32c(0, at, meta, kMetaBytes);
    at += kMetaBytes;
    for (size_t i = 0; i < num_parts; ++i) {
      const size_t size = parts[i].size;
      const size_t padding = up(size, kPartAlign) - size;
      crc = copy_crc32c(crc, at, parts[i].data, size);
      crc = copy_crc32c(crc, at + size, zeros, padding);
      at += size + padding;
    }
    put(kRecord, length, body, crc);
    return kWritten;
  }

 private:
  // Check that a frame fits; write a pad frame if it does not fit before the end.
  FrameStatus make_room(size_t length) {
    if (length > capacity_) return kTooLarge;
    const uint64_t tail = load_acquire(memory_ + kTailAt);
    if (tail < tail_ || tail > head_ || tail % kLineBytes != 0) {
      store_release(memory_ + kHeadAt, head_);
      return kCursor;
    }
    tail_ = tail;
    store_release(&end_->tail, tail);
    const size_t room = capacity_ - head_ % capacity_;
    if (length > room) {
      if (room > capacity_ - (head_ - tail_)) return kFull;
      // Publish the pad separately: a record larger than the free space can then use
      // the whole ring once the consumer has read the pad.
      put(kPad, room, 0, 0);
    }
    return length > capacity_ - (head_ - tail_) ? kFull : kWritten;
  }

  // Write the 64 bytes before a body and publish the frame to the reader.
  void put(uint16_t kind, uint64_t length, uint64_t body, uint32_t crc) {
    uint8_t frame[kFrameBytes] = {};
    std::memcpy(frame, &kMagic, 4);
    std::memcpy(frame + 4, &kind, 2);
    std::memcpy(frame + 8, &head_, 8);
    std::memcpy(frame + 16, &length, 8);
    std::memcpy(frame + 24, &body, 8);
    std::memcpy(frame + 32, &crc, 4);
    const uint32_t check = crc32c(0, frame, kFrameBytes - 4);
    std::memcpy(frame + kFrameBytes - 4, &check, 4);
    std::memcpy(memory_ + kDataAt + head_ % capacity_, frame, kFrameBytes);
    head_ += length;
    // The private copy first: a thread that reads both never sees the consumer ahead.
    store_release(&end_->head, head_);
    store_release(memory_ + kHeadAt, head_);
  }

  uint8_t* const memory_;
  const size_t capacity_;
  const size_t size_;
  const int descriptor_;
  uint64_t head_;
  uint64_t tail_;
  RingEnd* const end_;
};

}  // namespace

void write_frames(const Ring& ring, RingEnd* end, const Frames& frames, uint8_t* status) {
  Writer writer(ring, end);
  for (size_t i = 0; i < frames.count; ++i) {
    if (i > 0 && frames.follows[i] && status[i - 1] != kWritten) status[i] = kSkipped;
    if (status[i] != kWritten) continue;
    status[i] = writer.write(frames.metas + i * kMetaBytes,
                             frames.parts + i * frames.parts_each, frames.parts_each);
  }
}

}  // namespace tide
