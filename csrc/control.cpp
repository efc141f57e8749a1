#include "control.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tide {
namespace {

// What is no number is the least.
double within(double value, double least, double most) {
  return value > least ? std::min(value, most) : least;
}

// Of the target at a fractional number of verified tokens, linear in between.
double seconds_at(const Costs& costs, double verified) {
  const size_t last = costs.n * costs.most;
  const size_t whole =
      static_cast<size_t>(within(verified, 0.0, static_cast<double>(last)));
  if (whole == last) return costs.target[last];
  return costs.target[whole] + (costs.target[whole + 1] - costs.target[whole]) *
                                   (verified - static_cast<double>(whole));
}

// The classes around each request's place; their weights are returned.
std::vector<double> belong(const Costs& costs, const Classes& classes,
                           const Levels& levels) {
  std::vector<double> weight(classes.num_classes);
  const double top = static_cast<double>(classes.num_classes) - 1.0 - 1e-9;
  for (size_t i = 0; i < costs.n; ++i) {
    double at = levels.mean + (levels.place[levels.slots[i]] - levels.mean) * levels.keep;
    at = within(at, 0.0, top);
    const size_t low = static_cast<size_t>(at);
    const double upper = at - static_cast<double>(low);
    classes.of[i] = static_cast<int64_t>(low);
    classes.of[costs.n + i] = static_cast<int64_t>(low + 1);
    classes.share[i] = 1.0 - upper;
    classes.share[costs.n + i] = upper;
    weight[low] += 1.0 - upper;
    weight[low + 1] += upper;
  }
  return weight;
}

void add_scaled(double* to, const double* values, double scale, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] += scale * values[i];
}

}  // namespace

void table_chances(size_t n, const double* confidence, double least,
                   const int64_t* table_of, size_t num_tables, size_t stride,
                   const NodeTable& table, const double* offset, double* z,
                   double* logit, double* chance) {
  const double top = static_cast<double>(table.num_nodes) - 1.0 - 1e-9;
  for (size_t i = 0; i < n; ++i) {
    const double held = std::min(std::fmax(confidence[i], least), 1.0 - least);
    z[i] = std::log(held / (1.0 - held));
    const double at = within((z[i] - table.first) * table.per_node, 0.0, top);
    const size_t node = static_cast<size_t>(at);
    const size_t chosen = static_cast<uint64_t>(table_of[i]) < num_tables ? table_of[i] : 0;
    const size_t cell = chosen * stride + node;
    const double share = at - static_cast<double>(node);
    logit[i] = table.value[cell] + share * table.rise[cell] + offset[i];
    chance[i] = 1.0 / (1.0 + std::exp(-logit[i]));
  }
}

Forecast forecast(const Costs& costs, const Classes& classes, const Levels& levels,
                  const int64_t* room, const double* sets, size_t k, bool whole,
                  double client_share) {
  const size_t bins = classes.num_bins;
  const double n = static_cast<double>(costs.n), plain = n / costs.target[0];
  const std::vector<double> weight = belong(costs, classes, levels);
  std::vector<double> able(costs.most + 1);  // requests with room for so many
  for (size_t i = 0; i < costs.n; ++i)
    able[std::min(static_cast<size_t>(std::max<int64_t>(room[i], 0)), costs.most)] += 1.0;
  for (size_t j = costs.most; j > 0; --j) able[j - 1] += able[j];
  std::vector<double> verified(bins), expected(bins);
  Forecast all{0, n, costs.target[0], 0.0, false}, kept = all;
  double best = 0.0, best_kept = 0.0;
  for (size_t j = 0; j < costs.most; ++j) {
    const double part = able[j + 1] / n;  // who stops early is taken to be like the rest
    for (size_t c = 0; c < classes.num_classes; ++c) {
      if (weight[c] == 0.0) continue;
      const double* row = sets + (c * 2 * k + j) * bins;
      add_scaled(verified.data(), row, part * weight[c], bins);
      add_scaled(expected.data(), row + k * bins, part * weight[c], bins);
    }
    for (size_t b = whole ? bins - 1 : 0; b < bins; ++b) {
      const double spent = seconds_at(costs, verified[b]) + costs.draft[j + 1];
      const double tokens = expected[b] + n, ratio = tokens / (spent + costs.extra);
      all.free = std::max(all.free, ratio);
      const Forecast found{j + 1, tokens, spent + costs.extra, 0.0, false};
      if (spent <= costs.loose && ratio > best) {
        best = ratio;
        const double free = all.free;
        (all = found).free = free;
      }
      if (spent <= costs.limit && ratio > best_kept) {
        best_kept = ratio;
        kept = found;
      }
    }
  }
  kept.free = all.free;
  const bool fair = std::max(best_kept, plain) >= client_share * std::max(best, plain);
  if (costs.limit < costs.loose && !fair) {
    all.loosened = true;
    return all;
  }
  return kept;
}

bool draft_on(const Costs& costs, const Classes& classes, const DraftStep& at) {
  const size_t n = costs.n, bins = classes.num_bins;
  const int64_t step = static_cast<int64_t>(at.step);
  const bool last = at.step >= costs.most;
  std::vector<double> here(last ? 0 : classes.num_classes * bins);
  double left = 0.0;  // survivors who may go on
  bool able = false;
  for (size_t i = 0; i < n; ++i) {
    at.depth[i] -= std::log(at.chance[i]);
    const double survival = std::exp(-at.depth[i]);
    at.survival[i] =
        at.room[i] < step ? -1.0f : std::max(static_cast<float>(survival), 1e-6f);
    if (at.wanted[i] < step) continue;
    const double place = at.depth[i] * at.per_bin + 0.5;
    const size_t bin =
        static_cast<size_t>(within(place, 0.0, static_cast<double>(bins - 1)));
    at.drafted[bin] += 1.0;
    at.drafted[bins + bin] += survival;
    if (last || at.wanted[i] == step) continue;
    able = true;
    left += survival;
    for (size_t half : {i, i + n}) {
      const size_t kind = static_cast<size_t>(classes.of[half]);
      if (kind < classes.num_classes) here[kind * bins + bin] += classes.share[half];
    }
  }
  if (!able) return false;
  double binned = 0.0;
  for (size_t cell = 0; cell < here.size(); ++cell)
    binned += here[cell] * classes.chance[cell % bins];
  const double exact = left / binned;  // bins are coarse
  const bool rate = std::isnan(at.bar);
  const double plain = static_cast<double>(n);
  auto best_of = [&](const double* tokens, const double* survivors, size_t steps) {
    double best = -INFINITY, verified = 0.0, expected = plain;
    for (size_t b = 0; b < bins; ++b) {  // the most likely ones first
      verified += tokens[b];
      expected += survivors[b];
      if (at.whole && b + 1 < bins) continue;
      const double spent = seconds_at(costs, verified) + costs.draft[steps];
      if (spent > costs.limit) continue;
      best = std::max(best, rate ? expected / spent : expected - at.bar * spent);
    }
    return best;
  };
  // Stopping may also mean verifying nothing.
  const double stop = costs.target[0] + costs.draft[at.step];
  const double nothing = rate ? plain / stop : plain - at.bar * stop;
  const double now =
      std::max(best_of(at.drafted, at.drafted + bins, at.step), nothing);
  std::vector<double> tokens(at.drafted, at.drafted + bins), added(bins);
  std::vector<double> survivors(at.drafted + bins, at.drafted + 2 * bins);
  const size_t stride = at.k - at.step;
  for (size_t j = 0; j < costs.most - at.step; ++j) {
    std::fill(added.begin(), added.end(), 0.0);
    for (size_t cell = 0; cell < here.size(); ++cell) {
      if (here[cell] == 0.0) continue;
      const size_t bin = cell % bins;
      const double* row = at.gained + (cell / bins * stride + j) * bins;
      add_scaled(added.data() + bin, row, here[cell], bins - bin);
    }
    for (size_t b = 0; b < bins; ++b) {
      tokens[b] += added[b];
      survivors[b] += added[b] * classes.chance[b] * exact;
    }
    if (best_of(tokens.data(), survivors.data(), at.step + 1 + j) > now) return true;
  }
  return false;
}

void convolve(const double* single, size_t num_classes, size_t k, size_t num_bins,
              double* gained) {
  for (size_t s = 0; s < k; ++s)
    for (size_t c = 0; c < num_classes; ++c) {
      const double* own = single + c * k * num_bins;
      std::copy_n(own + s * num_bins, num_bins, gained);
      for (size_t j = s + 1; j < k; ++j, gained += num_bins) {
        double* next = gained + num_bins;
        std::fill_n(next, num_bins, 0.0);
        for (size_t b = 0; b < num_bins; ++b)
          add_scaled(next + b, own + j * num_bins, gained[b], num_bins - b);
      }
      gained += num_bins;
    }
}

bool learn_levels(Filter& filter, size_t n, size_t steps, const int64_t* slots,
                  const double* logits, const double* chance, const uint8_t* drafted) {
  const double top = static_cast<double>(filter.num_classes) - 1.0 - 1e-9;
  auto place_of = [&](double level) {
    return within((level - filter.first) * filter.per_level, 0.0, top);
  };
  double total = 0.0;
  for (size_t j = 0; j < steps; ++j) {
    // How much lower later positions are, within the same rounds and requests.
    double count = 0.0, below = 0.0;
    for (size_t i = 0; i < n; ++i) {
      if (!drafted[j * n + i]) continue;
      count += 1.0;
      below += logits[j * n + i] - logits[i];
    }
    filter.fall[j] += (below - count * filter.fall[j]) / (count + filter.fall_tokens);
    total += count;
  }
  if (total == 0.0) return false;
  std::vector<double> sums(n), tokens(n);
  double sum = 0.0;
  for (size_t j = 0; j < steps; ++j)
    for (size_t i = 0; i < n; ++i) {
      if (!drafted[j * n + i]) continue;
      // Sure tokens are sure enough: how sure must not hide the unsure ones.
      const double kept = std::min(logits[j * n + i], filter.sure) - filter.fall[j];
      sums[i] += kept;
      tokens[i] += 1.0;
      sum += kept;
    }
  filter.mean += (sum / total - filter.mean) * total / (total + filter.mean_tokens);
  for (size_t slot = 0; filter.keep < 1.0 && slot < filter.capacity; ++slot) {
    double& level = filter.level[slot];
    level += (filter.mean - level) * (1.0 - filter.keep);
    filter.place[slot] = place_of(level);
  }
  // A Kalman filter of the levels.
  for (size_t i = 0; i < n; ++i) {
    const size_t slot = static_cast<size_t>(slots[i]);
    const double variance = std::min(filter.variance[slot] + filter.drift, filter.between);
    const double spread = variance * tokens[i] + filter.within;
    double& level = filter.level[slot];
    level += variance / spread * (sums[i] - tokens[i] * level);
    filter.place[slot] = place_of(level);
    filter.variance[slot] = variance * filter.within / spread;
  }
  const double decay = std::pow(0.5, total / filter.half_life);
  const size_t bins = filter.num_bins;
  for (size_t cell = 0; cell < filter.num_classes * filter.k * bins; ++cell)
    filter.counts[cell] *= decay;
  for (size_t i = 0; i < n; ++i) {
    const size_t nearest = static_cast<size_t>(filter.place[slots[i]] + 0.5);
    for (size_t j = 0; j < steps; ++j) {
      if (!drafted[j * n + i]) continue;
      const double given = chance[j * n + i], at = -std::log(given) * filter.per_bin;
      const size_t bin =
          static_cast<size_t>(within(at, 0.0, static_cast<double>(bins - 2)));
      const double upper = filter.chance[bin], lower = filter.chance[bin + 1];
      // Split so that the mean survival is kept.
      const double part = std::max((given - lower) / (upper - lower), 0.0);
      double* row = filter.counts + (nearest * filter.k + j) * bins + bin;
      row[0] += part;
      row[1] += 1.0 - part;
    }
  }
  return true;
}

void judge(const Round& round, Labels& labels) {
  const size_t n = round.n, each = round.most * n;
  std::vector<int64_t> sent(n), passed(n);
  labels.count = 0;
  labels.tokens = static_cast<double>(round.num_rows);
  for (size_t r = 0; r < round.num_rows; ++r) {
    sent[round.rows[r]] = round.verified[r];
    passed[round.rows[r]] = round.accepted[r];
  }
  std::vector<double> surprise(n), weight(n);
  for (size_t j = 0; j < round.steps; ++j) {
    const int64_t position = static_cast<int64_t>(j);
    for (size_t i = 0; i < n; ++i) {
      if (position >= sent[i]) continue;
      labels.tokens += static_cast<double>(round.survival[j * n + i]);
      if (position > passed[i]) continue;  // never judged
      const double chance = round.values[2 * each + j * n + i];
      const double hit = position < passed[i] ? 1.0 : 0.0;
      const size_t at = labels.count++;
      labels.position[at] = position;
      labels.row[at] = static_cast<int64_t>(i);
      labels.z[at] = round.values[j * n + i];
      labels.predicted[at] = chance;
      labels.hit[at] = hit;
      surprise[i] += hit - chance;
      weight[i] += chance * (1.0 - chance);
    }
  }
  for (size_t i = 0; labels.count && i < n; ++i) {
    double& precision = round.precision[round.slots[i]];
    double& offset = round.offset[round.slots[i]];
    precision = std::max(precision * round.keep, round.prior) + weight[i];
    const double moved = offset + surprise[i] / precision;
    offset = std::max(std::min(moved, round.limit), -round.limit);
  }
}

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
  // Ties: the last of them are given up, request by request.
  for (size_t i = n; i > 0 && taken > best.total; --i) {
    int64_t& length = lengths[i - 1];
    while (taken > best.total && length && survival[(length - 1) * n + i - 1] == least) {
      --length;
      --taken;
    }
  }
  return best;
}

}  // namespace tide
