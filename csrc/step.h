// The records of a step: the rows of its arrays by request (capture/step.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide {

// A captured request of a step; `REQUEST` of capture/step.py.
struct Request {
  uint64_t key;
  uint64_t tenant;
  int64_t flags;
  int64_t low;    // its first row in the staged rows
  int64_t first;  // its first row in the token ids
  int64_t count;
  int64_t drafts;
  int64_t padding;
  int64_t start;
  int64_t num_prompt_tokens;
  int64_t logit_end;
  int64_t committed;
  int64_t next_token;
  double verify_chance;
  double cost;
};

// The fixed part of a record; `META` of transport/record.py.
struct Meta {
  uint64_t key;
  uint64_t draft_version;
  int64_t start;
  int64_t num_prompt_tokens;
  int64_t next_token;
  int32_t num_accepted;
  uint32_t rows;
  uint32_t padding;
  uint32_t feature_width;
  uint32_t teacher_start;
  uint32_t hidden_width;
  uint32_t topk;
  uint8_t phase;
  uint8_t flags;
  uint8_t dtype;
  uint8_t format;
  uint64_t tenant;
  uint32_t concurrency;
  float cost;
  float verify_chance;
  uint32_t end;
};

// Position of a part of a record in its source (bytes).
struct Span {
  int64_t begin;
  int64_t size;
};

enum FlagOfMeta : uint8_t { kHidden = 2, kTopk = 4 };

// Rows with a teacher: none, those with logits, or all.
enum class Taught { kNone, kSampled, kAll };

struct StepFacts {
  Meta meta;            // fields common to all records
  uint64_t drafted_by;  // version that drafted the verified tokens
  Taught taught;
  int64_t max_rows;     // per record; 0: unlimited
  std::vector<int64_t> row_bytes;  // of token ids, features, and the teacher's arrays
};

struct Layout {
  std::vector<Meta> metas;
  std::vector<Span> spans;       // one per part, for each record
  std::vector<uint8_t> follows;  // whether it continues the previous record
  std::vector<uint8_t> sound;    // whether its counts are consistent
  std::vector<int64_t> of;       // its request
};

Layout lay_out(const Request* requests, size_t count, const StepFacts& step);

}  // namespace tide
