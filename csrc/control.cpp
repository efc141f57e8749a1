#include "control.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tide {

Chosen best_set(const float* order, size_t num_order, const float* survival, size_t steps,
                size_t n, double plain_tokens, const double* seconds, double limit,
                double bar, int64_t* lengths) {
  const bool rate = std::isnan(bar);
  double sum = 0.0;
  double most = rate ? plain_tokens / seconds[0] : plain_tokens - bar * seconds[0];
  Chosen best{0, plain_tokens, seconds[0]};
  size_t m = 0;
  for (; m < num_order && order[num_order - 1 - m] >= 0.0f; ++m) {
    sum += static_cast<double>(order[num_order - 1 - m]);
    const double tokens = sum + plain_tokens, spent = seconds[m + 1];
    if (spent > limit) continue;
    const double value = rate ? tokens / spent : tokens - bar * spent;
    if (value > most) {
      most = value;
      best = {m + 1, tokens, spent};
    }
  }
  const float least = best.total ? order[num_order - best.total] : 0.0f;
  size_t taken = 0;
  for (size_t i = 0; i < n; ++i) {
    lengths[i] = 0;
    if (!best.total) continue;
    for (size_t j = 0; j < steps && survival[j * n + i] >= least; ++j) ++lengths[i];
    taken += static_cast<size_t>(lengths[i]);
  }
  // Ties: remove the last ones, request by request.
  for (size_t i = n; i > 0 && taken > best.total; --i) {
    int64_t& length = lengths[i - 1];
    while (taken > best.total && length && survival[(length - 1) * n + i - 1] == least) {
      --length;
      --taken;
    }
  }
  return best;
}

void survival(const Drafts& drafts, const double* knots, const double* curves, size_t cells,
              const double* requests, double* logits, float* survival) {
  for (size_t i = 0; i < drafts.n; ++i) {
    const double* curve = curves + (drafts.sampled[i] ? cells : 0);
    const double request = requests[drafts.slots[i]];
    double alive = 1.0;
    for (size_t j = 0; j < drafts.steps; ++j) {
      const size_t at = j * drafts.n + i;
      if (static_cast<int64_t>(j) >= drafts.room[i]) {
        logits[at] = std::numeric_limits<double>::quiet_NaN();
        survival[at] = -1.0f;
        continue;
      }
      const double confidence = drafts.confidence[at];
      const size_t above = std::upper_bound(knots, knots + cells, confidence) - knots;
      if (std::isnan(confidence)) {
        logits[at] = confidence;
        alive = 0.0;
      } else {
        const size_t high = std::clamp<size_t>(above, 1, cells - 1), low = high - 1;
        const double share = (confidence - knots[low]) / (knots[high] - knots[low]);
        logits[at] = request + curve[low] +
                     std::clamp(share, 0.0, 1.0) * (curve[high] - curve[low]);
        alive /= 1.0 + std::exp(-logits[at]);
      }
      survival[at] = static_cast<float>(alive);
    }
  }
}

}  // namespace tide
