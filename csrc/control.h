// The inner loops of a draft step's decision (vllm_tide/control). Between two draft
// passes a token waits for them, and numpy calls on a few numbers each are mostly what
// they cost. No Python here; bindings.cpp wraps it.
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
// what the request's table says of them to `logit`. `table_of`: [n], which of the
// `num_tables` tables that lie `stride` values apart; any other number: the first.
void table_logits(size_t n, const double* confidence, double least,
                  const int64_t* table_of, size_t num_tables, size_t stride,
                  const NodeTable& table, double* z, double* logit);

// What another draft step is weighed with; see Drafter._shortcut.
struct Ahead {
  size_t n, num_classes, num_steps, num_bins;
  const double* depth;      // [n], -log(survival) of the last tokens in bins
  const double* kept;       // [n], their survival; 0: cannot go on
  const double* share;      // [2n], of the classes that a request belongs to
  const int64_t* class_of;  // [2n]
  const double* excess;     // [num_classes, num_steps, num_bins + 1]
  const double* cost;       // [>= num_drafts], tokens that 1, 2, ... more steps cost
  size_t num_drafts;
  double cheap, dear;       // bins of the lowest and highest price of verifying a token
};

enum class Verdict { kStop = 0, kGoOn = 1, kUnclear = 2 };

Verdict next_pays(const Ahead& ahead);

}  // namespace tide
