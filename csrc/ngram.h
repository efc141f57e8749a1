// The n-gram index of requests' own texts (vllm_tide/memory/ngram.py, which says what
// the arrays hold). No Python here; control_bindings.cpp wraps it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// Lengths of the grams that are looked up, the longest first; ORDERS in Python.
constexpr int64_t kOrders[] = {8, 5, 3};
constexpr int64_t kLongest = kOrders[0];
constexpr int64_t kNumOrders = sizeof kOrders / sizeof *kOrders;

struct NgramIndex {
  size_t capacity;     // slots
  int64_t width;       // tokens of a slot; its text begins `most_match` behind the first
  int64_t most_match;  // a hit is extended backwards to so many tokens, >= kLongest
  int bits;            // cells of a table: 1 << bits
  int32_t* last;       // [orders, capacity, 1 << bits]
  int32_t* tokens;     // [capacity, width]
  int64_t* length;     // [capacity]
  int64_t* indexed;    // [capacity]
  const uint64_t* factors;  // [kLongest], odd
};

// What a step adds to the texts of n requests: `count[i]` of the w tokens of `fresh[i]`.
struct NewTokens {
  size_t n, w;
  const int64_t* slots;
  const int64_t* known;  // tokens before
  const int64_t* count;
  const int32_t* fresh;
};

// False if a slot or a text lies outside of the index, or there are more tokens than w.
bool fits(const NgramIndex& index, const NewTokens& added);

// Appends the tokens, enters up to `chunk` grams, and looks up the end of each text: what
// followed its latest occurrence to `proposed` [n, most], -1 where nothing matches, and
// the length of the match, 0 there, to `match` [n].
void propose(const NgramIndex& index, const NewTokens& added, int64_t chunk, size_t most,
             int64_t* proposed, int64_t* match);

}  // namespace tide
