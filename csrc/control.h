// The inner loops of control's decisions (vllm_tide/control). Between two passes tokens
// wait for them, the target's weights have just gone through the caches, and numpy calls
// on a few numbers each would be most of what they cost. No Python here;
// control_bindings.cpp wraps it and checks that arrays are as long as they say.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// A function of log-odds of confidence at equally spaced nodes, linear in between.
struct NodeTable {
  const double* value;
  const double* rise;  // to the next node
  size_t num_nodes;
  double first, per_node;  // the first node, and nodes per unit of log-odds
};

// Log-odds of confidences [n], kept `least` from 0 and 1 (nan: no confidence), to `z`;
// what the request's table says of them, and its offset, to `logit`, as a probability
// to `chance`. `table_of`: [n], which of the `num_tables` tables that lie `stride`
// values apart; any other number: the first.
void table_chances(size_t n, const double* confidence, double least,
                   const int64_t* table_of, size_t num_tables, size_t stride,
                   const NodeTable& table, const double* offset, double* z,
                   double* logit, double* chance);

// Seconds of a round's choices; see costs.py.
struct Costs {
  size_t n, most;        // requests, draft steps
  const double* target;  // [n * most + 1] by verified tokens
  const double* draft;   // [most + 1] by draft steps
  double extra, limit, loose;
};

// Distributions over `num_bins` bins of -log(survival); see history.py.
struct Classes {
  size_t num_classes, num_bins;
  const double* chance;  // [num_bins], survival of each bin
  int64_t* of;           // [2n], the two classes of each request: the lower, the upper
  double* share;         // [2n], how far it belongs to them
};

struct Levels {
  const int64_t* slots;  // [n]
  const double* place;   // by slot, among the classes
  size_t capacity;
  double mean, keep;     // what is left of a place's distance to the mean
};

struct Forecast {
  size_t steps;  // 0: none is within the limit
  double tokens, seconds, free;
  bool loosened;  // `limit` cost too much: `loose` counts
};

// The best round with a draft step, before any confidence; fills `of` and `share`.
// `sets`: [num_classes, 2, k, num_bins], tokens of at least a bin's survival at each
// position, and survivors among them. `whole`: all that is drafted is verified. Limits
// count if at least `client_share` of the tokens per second are left.
Forecast forecast(const Costs& costs, const Classes& classes, const Levels& levels,
                  const int64_t* room, const double* sets, size_t k, bool whole,
                  double client_share);

struct DraftStep {
  size_t step;            // 1, 2, ...
  const double* chance;   // [n], of this step's tokens
  double* depth;          // [n], -log(survival), of the tokens before; moves on
  float* survival;        // [n], out; -1 where a request has no such token
  const int64_t* room;    // [n], tokens that a request may have
  const int64_t* wanted;  // [n], those that are of use to it
  double* drafted;        // [2, num_bins], tokens and survivors so far; moves on
  const double* gained;   // [num_classes, k - step, num_bins], survival of what follows
  size_t k;
  double per_bin, bar;    // bins per unit of depth; nan: tokens / seconds of this round
  bool whole;
};

// Whether another draft step pays.
bool draft_on(const Costs& costs, const Classes& classes, const DraftStep& at);

// Distributions of the survival gained over positions s + 1 .. j: for s = 0, 1, ... an
// array [num_classes, k - s, num_bins] behind the one before. `single`: [num_classes,
// k, num_bins], of each position alone. What falls off the grid is left out.
void convolve(const double* single, size_t num_classes, size_t k, size_t num_bins,
              double* gained);

// What a `History` knows of requests, and what it takes for granted; see history.py.
struct Filter {
  size_t capacity, k, num_classes, num_bins;
  double *level, *place, *variance;  // [capacity]
  double* fall;                      // [k]
  double* counts;                    // [num_classes, k, num_bins]
  const double* chance;              // [num_bins]
  double mean, keep;                 // of the workload; what idling left of the levels
  double half_life, sure, mean_tokens, between, within, drift, fall_tokens;
  double first, per_level, per_bin;
};

// Takes a round's draft tokens, [steps, n] each; `mean` moves on. False: there is none.
bool learn_levels(Filter& filter, size_t n, size_t steps, const int64_t* slots,
                  const double* logits, const double* chance, const uint8_t* drafted);

// A round that was verified, and the requests' offsets; see adaspec.py, calibration.py.
struct Round {
  size_t n, most, steps;
  const double* values;     // [3, most, n]
  const float* survival;    // [most, n]
  size_t num_rows;          // requests that were answered
  const int64_t *rows, *verified, *accepted;  // [num_rows]
  const int64_t* slots;     // [n]
  double *offset, *precision;  // by slot
  double keep, prior, limit;
};

struct Labels {
  size_t count;
  int64_t *position, *row;       // [steps * n]
  double *z, *predicted, *hit;   // [steps * n]
  double tokens;                 // that were expected of the round
};

// Labels of the tokens that were judged; the offsets move where there are any.
void judge(const Round& round, Labels& labels);

struct Chosen {
  size_t total;
  double tokens, seconds;
};

// The verified set of most value; see verifier.py. `order`: all survivals, ascending;
// `seconds` by verified tokens; `lengths`: [n], out.
Chosen best_set(const float* order, size_t num_order, const float* survival, size_t steps,
                size_t n, double plain_tokens, const double* seconds, double limit,
                double bar, int64_t* lengths);

}  // namespace tide
