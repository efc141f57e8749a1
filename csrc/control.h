// The inner loops of control: what a model evicted from the caches costs several times as
// much, so one call stands for many. No Python here; control_bindings.cpp wraps it and checks
// that arrays are as long as they say.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

struct Chosen {
  size_t total;
  double tokens, seconds;
};

// The verified set of most value; see verifier.py. `order`: all survivals, ascending;
// `seconds` by verified tokens; `lengths`: [n], out.
Chosen best_set(const float* order, size_t num_order, const float* survival, size_t steps,
                size_t n, double plain_tokens, const double* seconds, double limit,
                double bar, int64_t* lengths);

// Drafts of n requests, [steps, n]: the draft's confidences.
struct Drafts {
  const float* confidence;
  size_t steps, n;
  const int64_t *slots, *room;  // [n]; from `room` tokens on there is none
  const bool* sampled;          // [n]
};

// Log-odds of acceptance, nan where there is no token, and survival, -1 there; see
// vllm_tide/control/acceptance.py. `curves`: [2, cells], greedy and sampled, at the
// confidences `knots`; `requests`: by slot.
void survival(const Drafts& drafts, const double* knots, const double* curves, size_t cells,
              const double* requests, double* logits, float* survival);

}  // namespace tide
