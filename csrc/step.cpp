#include "step.h"

#include <algorithm>

namespace tide {
namespace {

constexpr uint8_t kPrefill = 0;
constexpr uint8_t kVerify = 1;

int64_t pieces(int64_t rows, int64_t most) {
  return (std::max<int64_t>(rows, 0) + most - 1) / most;
}

bool counts_are_sound(const Meta& meta) {
  if (meta.teacher_start > meta.rows) return false;
  if (meta.rows == 0) return true;
  const int64_t accepted = meta.num_accepted;
  const int64_t last = static_cast<int64_t>(meta.rows) - 1;
  return meta.phase == kVerify ? accepted >= 0 && accepted <= last : accepted == last;
}

// Add rows [low, high) of a request as a record.
void add(const Request& request, size_t of, int64_t low, int64_t high, const StepFacts& step,
         Layout* layout) {
  const int64_t count = request.count;
  const int64_t before = count - 1 - request.drafts;  // the last row that is not a draft token
  const bool final = high == count;
  const bool verify = request.drafts > 0 || count == 1;
  int64_t taught = step.taught == Taught::kNone ? count : 0;
  if (step.taught == Taught::kSampled) taught = std::max<int64_t>(before, 0);
  taught = std::min(std::max(taught, low), high);
  const int64_t accepted =
      std::min(before + std::max<int64_t>(request.committed - 1, 0), count - 1);

  Meta meta = step.meta;
  meta.key = request.key;
  meta.tenant = request.tenant;
  if (verify) meta.draft_version = step.drafted_by;
  meta.start = request.start + low;
  meta.num_prompt_tokens = request.num_prompt_tokens;
  meta.next_token = final ? request.next_token : -1;
  meta.num_accepted = static_cast<int32_t>(final ? accepted - low : high - low - 1);
  meta.rows = static_cast<uint32_t>(high - low);
  meta.teacher_start = static_cast<uint32_t>(taught - low);
  meta.phase = final && verify ? kVerify : kPrefill;
  meta.flags |= static_cast<uint8_t>(request.flags);
  meta.cost = static_cast<float>(request.cost);
  meta.verify_chance = static_cast<float>(request.verify_chance);

  for (size_t part = 0; part < step.row_bytes.size(); ++part) {
    int64_t begin = request.first + low;
    int64_t rows = high - low;
    if (part == 1) begin = request.low + low;
    if (part > 1) {
      rows = high - taught;
      begin = meta.flags & kHidden
                  ? request.low + taught
                  : request.logit_end - request.padding - count + taught;
    }
    // Without rows there is no offset: a part of a prompt may have no logits.
    const int64_t each = step.row_bytes[part];
    layout->spans.push_back({rows > 0 ? begin * each : 0, rows * each});
  }
  layout->follows.push_back(low > 0);
  layout->sound.push_back(counts_are_sound(meta));
  layout->of.push_back(static_cast<int64_t>(of));
  layout->metas.push_back(meta);
}

}  // namespace

Layout lay_out(const Request* requests, size_t count, const StepFacts& step) {
  Layout layout;
  for (size_t i = 0; i < count; ++i) {
    const Request& request = requests[i];
    const int64_t before = request.count - 1 - request.drafts;
    const int64_t most = step.max_rows;
    int64_t low = 0;
    // Split a long prompt into records of which many fit into the ring. Draft tokens stay
    // in one record with the row before them.
    if (most > 0) {
      const int64_t cuts = std::min(pieces(request.count, most) - 1, pieces(before, most));
      for (int64_t nth = 0; nth < cuts; ++nth) {
        const int64_t high = std::min((nth + 1) * most, before);
        add(request, i, low, high, step, &layout);
        low = high;
      }
    }
    add(request, i, low, request.count, step, &layout);
  }
  return layout;
}

}  // namespace tide
