// The inner loops of control. One call replaces many, as code and data that a model pass
// evicted from the caches cost several times as much. No Python here; control_bindings.cpp
// wraps it and checks the sizes of arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

struct Chosen {
  size_t total;
  double tokens, seconds;
};

// Find the verified set of the highest value; see verifier.py. `order`: all survivals,
// ascending; `seconds`: by verified tokens; `lengths`: [n], output.
Chosen best_set(const float* order, size_t num_order, const float* survival, size_t steps,
                size_t n, double plain_tokens, const double* seconds, double limit,
                double bar, int64_t* lengths);

// Drafts of n requests, [steps, n]: the draft's confidences.
struct Drafts {
  const float* confidence;
  size_t steps, n;
  const int64_t *slots, *room;  // [n]; `room`: maximum draft tokens
  const bool* sampled;          // [n]
};

// Compute log-odds of acceptance and survival (nan and -1 where there is no token); see
// vllm_tide/control/acceptance.py. `curves`: [2, cells], greedy and sampled, at the
// confidences `knots`; `requests`: by slot.
void survival(const Drafts& drafts, const double* knots, const double* curves, size_t cells,
              const double* requests, double* logits, float* survival);

}  // namespace tide
