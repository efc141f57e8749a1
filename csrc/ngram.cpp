#include "ngram.h"

#include <algorithm>

namespace tide {
namespace {

// Compute the cells of the n-grams that end before `end`, one per order.
void cells_of(const NgramIndex& index, size_t slot, const int32_t* end, size_t* cells) {
  uint64_t sum = 0;
  int64_t back = 0;
  for (int64_t order = kNumOrders - 1; order >= 0; --order) {
    for (; back < kOrders[order]; ++back)
      sum += static_cast<uint64_t>(static_cast<int64_t>(end[-1 - back])) * index.factors[back];
    const size_t table = static_cast<size_t>(order) * index.capacity + slot;
    cells[order] = (table << index.bits) + (sum >> (64 - index.bits));
  }
}

}  // namespace

bool fits(const NgramIndex& index, const NewTokens& added) {
  const int64_t longest = index.width - index.most_match;
  for (size_t i = 0; i < added.n; ++i) {
    const int64_t slot = added.slots[i], known = added.known[i], count = added.count[i];
    if (slot < 0 || static_cast<size_t>(slot) >= index.capacity || known < 0 || count < 0 ||
        static_cast<size_t>(count) > added.w || known > longest - count ||
        index.indexed[slot] < 0)
      return false;
  }
  return true;
}

void propose(const NgramIndex& index, const NewTokens& added, int64_t chunk, size_t most,
             int64_t* proposed, int64_t* match) {
  for (size_t i = 0; i < added.n; ++i) {
    const size_t slot = static_cast<size_t>(added.slots[i]);
    int32_t* text = index.tokens + slot * static_cast<size_t>(index.width) + index.most_match;
    const int64_t length = added.known[i] + added.count[i];
    std::copy_n(added.fresh + i * added.w, added.count[i], text + added.known[i]);
    index.length[slot] = length;

    size_t cells[kNumOrders];
    // Index all n-grams except the last one, which is looked up.
    for (; chunk > 0 && index.indexed[slot] < length - 1; --chunk) {
      const int64_t end = ++index.indexed[slot];
      cells_of(index, slot, text + end, cells);
      for (int64_t order = 0; order < kNumOrders; ++order)
        if (end >= kOrders[order]) index.last[cells[order]] = static_cast<int32_t>(end);
    }

    match[i] = 0;
    std::fill_n(proposed + i * most, most, -1);
    cells_of(index, slot, text + length, cells);
    for (int64_t order = 0; order < kNumOrders && match[i] == 0; ++order) {
      const int64_t there = index.last[cells[order]];
      // An entry may belong to a longer text, of the previous request of the slot.
      if (there <= 0 || there >= length) continue;
      int64_t run = 0;
      while (run < std::min(index.most_match, there) &&
             text[there - 1 - run] == text[length - 1 - run])
        ++run;
      if (run < kOrders[order]) continue;
      match[i] = run;
      for (size_t j = 0; j < most; ++j)
        proposed[i * most + j] = text[there + static_cast<int64_t>(j) % (length - there)];
    }
  }
}

}  // namespace tide
