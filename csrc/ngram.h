// The n-gram index of the texts of requests; vllm_tide/memory/ngram.py describes the
// arrays. No Python here; control_bindings.cpp wraps it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// Lengths of the n-grams that are looked up, longest first; ORDERS in Python.
constexpr int64_t kOrders[] = {5, 3, 2};
constexpr int64_t kLongest = kOrders[0];
constexpr int64_t kNumOrders = sizeof kOrders / sizeof *kOrders;

struct NgramIndex {
  size_t capacity;     // slots
  int64_t width;       // tokens per slot; its text begins at index `most_match`
  int64_t most_match;  // maximum length of a backward match, >= kLongest
  int bits;            // a table has 1 << bits cells
  int32_t* last;       // [orders, capacity, 1 << bits]
  int32_t* tokens;     // [capacity, width]
  int64_t* length;     // [capacity]
  int64_t* indexed;    // [capacity]
  const uint64_t* factors;  // [kLongest], odd
};

// New tokens of n requests in a step: `count[i]` of the w tokens of `fresh[i]`.
struct NewTokens {
  size_t n, w;
  const int64_t* slots;
  const int64_t* known;  // tokens before the step
  const int64_t* count;
  const int32_t* fresh;
};

// Return false if a slot or a text is outside the index, or a count exceeds w.
bool fits(const NgramIndex& index, const NewTokens& added);

// Append the tokens, index up to `chunk` n-grams, and look up the end of each text. Store
// the continuation of its latest occurrence in `proposed` [n, most] (-1 without a match)
// and the length of the match (0 without) in `match` [n].
void propose(const NgramIndex& index, const NewTokens& added, int64_t chunk, size_t most,
             int64_t* proposed, int64_t* match);

}  // namespace tide
