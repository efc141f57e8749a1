#include "control.h"

#include <algorithm>
#include <cmath>

namespace tide {
namespace {

// Adds to gained[j] what j + 1 more steps gain above a price of verifying, in bins.
void gain(const Ahead& ahead, double price, double most, bool up, size_t num_drafts,
          double* gained) {
  for (size_t i = 0; i < ahead.n; ++i) {
    const double place = price - ahead.depth[i];
    const double bin = up ? std::ceil(place) : std::floor(place);
    const size_t at = bin > 0.0 ? static_cast<size_t>(std::min(bin, most)) : 0;
    for (size_t half : {i, i + ahead.n}) {
      const double worth = ahead.share[half] * ahead.kept[i];
      const int64_t kind = ahead.class_of[half];
      if (worth == 0.0 || kind < 0 || static_cast<size_t>(kind) >= ahead.num_classes) continue;
      const double* row =
          ahead.excess + static_cast<size_t>(kind) * ahead.num_steps * (ahead.num_bins + 1);
      for (size_t j = 0; j < num_drafts; ++j)
        gained[j] += worth * row[j * (ahead.num_bins + 1) + at];
    }
  }
}

}  // namespace

void table_logits(size_t n, const double* confidence, double least,
                  const int64_t* table_of, size_t num_tables, size_t stride,
                  const NodeTable& table, double* z, double* logit) {
  const double top = static_cast<double>(table.num_nodes) - 1.0 - 1e-9;
  for (size_t i = 0; i < n; ++i) {
    const double held = std::min(std::fmax(confidence[i], least), 1.0 - least);
    z[i] = std::log(held / (1.0 - held));
    const double at = std::min(std::max((z[i] - table.first) * table.per_node, 0.0), top);
    const size_t node = static_cast<size_t>(at);
    const size_t chosen = static_cast<uint64_t>(table_of[i]) < num_tables ? table_of[i] : 0;
    const size_t cell = chosen * stride + node;
    logit[i] = table.value[cell] + (at - static_cast<double>(node)) * table.rise[cell];
  }
}

Verdict next_pays(const Ahead& ahead) {
  constexpr size_t kMost = 64;
  const size_t num_drafts = std::min(ahead.num_drafts, ahead.num_steps);
  if (num_drafts < 1 || num_drafts > kMost) return Verdict::kUnclear;
  const double last = static_cast<double>(ahead.num_bins);
  double gained[kMost] = {};
  gain(ahead, ahead.cheap, last, true, num_drafts, gained);
  bool pays = false;
  for (size_t j = 0; j < num_drafts; ++j) pays |= gained[j] > ahead.cost[j];
  if (!pays) return Verdict::kStop;
  double first[1] = {};
  gain(ahead, ahead.dear, last - 1.0, false, 1, first);
  return first[0] > ahead.cost[0] ? Verdict::kGoOn : Verdict::kUnclear;
}

}  // namespace tide
