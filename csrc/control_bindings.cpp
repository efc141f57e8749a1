// Control's decisions (control.h) and the memory's looks (ngram.h) for Python: arrays of
// NumPy, each checked for its type, its size and the places that it names.
#include "bindings.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "control.h"
#include "ngram.h"

namespace {

using tide::Buffer;

// Characters of Python's struct that mean a Value.
template <typename Value>
constexpr const char* kFormats = "";
template <>
constexpr const char* kFormats<double> = "d";
template <>
constexpr const char* kFormats<float> = "f";
template <>
constexpr const char* kFormats<int32_t> = "i";
template <>
constexpr const char* kFormats<int64_t> = "lq";
template <>
constexpr const char* kFormats<uint64_t> = "LQ";
template <>
constexpr const char* kFormats<uint8_t> = "B?";

// A buffer of `count` values, or false with an error.
template <typename Value>
bool values_of(const Buffer& buffer, size_t count, const char* what, const Value** values) {
  const char* format = buffer.format() == nullptr ? "B" : buffer.format();
  if (std::strlen(format) != 1 || std::strchr(kFormats<Value>, *format) == nullptr) {
    PyErr_Format(PyExc_TypeError, "%s has values of type '%s' (struct's codes), not '%c'",
                 what, format, *kFormats<Value>);
    return false;
  }
  if (buffer.size() != count * sizeof(Value)) {
    PyErr_Format(PyExc_ValueError, "%s has %zu bytes, not %zu", what, buffer.size(),
                 count * sizeof(Value));
    return false;
  }
  *values = reinterpret_cast<const Value*>(buffer.data());
  return true;
}

// The arrays of one call; the first that does not fit is the error, and the rest null.
class Arrays {
 public:
  template <typename Value>
  const Value* in(PyObject* object, size_t count, const char* what) {
    return take<Value>(object, PyBUF_FORMAT, count, what);
  }
  template <typename Value>
  Value* out(PyObject* object, size_t count, const char* what) {
    return const_cast<Value*>(take<Value>(object, PyBUF_FORMAT | PyBUF_WRITABLE, count, what));
  }
  // As many as there are.
  template <typename Value>
  const Value* all(PyObject* object, size_t* count) {
    const Value* found = take<Value>(object, PyBUF_FORMAT, kAny, "an array");
    *count = found == nullptr ? 0 : held_[used_ - 1].size() / sizeof(Value);
    return found;
  }
  bool fit() const { return fit_; }
  bool fail(const char* why) {
    if (fit_) PyErr_SetString(PyExc_ValueError, why);
    return fit_ = false;
  }

 private:
  static constexpr size_t kAny = static_cast<size_t>(-1);

  template <typename Value>
  const Value* take(PyObject* object, int flags, size_t count, const char* what) {
    static const Value none[1] = {};
    const Value* found = nullptr;
    if (!fit_) return nullptr;
    Buffer& buffer = held_[used_++];
    fit_ = buffer.acquire(object, flags);
    if (fit_ && count == kAny) count = buffer.size() / sizeof(Value);
    fit_ = fit_ && values_of(buffer, count, what, &found);
    return fit_ && found == nullptr ? none : found;
  }

  Buffer held_[20];
  size_t used_ = 0;
  bool fit_ = true;
};

// True if all of them are below `limit`.
bool below(Arrays& arrays, const int64_t* values, size_t count, size_t limit) {
  for (size_t i = 0; arrays.fit() && i < count; ++i)
    if (static_cast<uint64_t>(values[i]) >= limit)
      return arrays.fail("a slot or a row lies outside of its array");
  return arrays.fit();
}

// More positions, nodes or bins than anything has; products of them do not overflow.
constexpr Py_ssize_t kMostCells = 1 << 20;

PyObject* py_table_chances(PyObject*, PyObject* args) {
  PyObject *values, *confidence, *table_of, *offset, *value, *rise;
  Py_ssize_t step, num_nodes, stride;
  double first, per_node, least;
  if (!PyArg_ParseTuple(args, "OnOOOOOnnddd:table_chances", &values, &step, &confidence,
                        &table_of, &offset, &value, &rise, &num_nodes, &stride, &first,
                        &per_node, &least))
    return nullptr;
  Arrays arrays;
  size_t n, size, room;
  const double* given = arrays.all<double>(confidence, &n);
  const int64_t* chosen = arrays.in<int64_t>(table_of, n, "table_of");
  const double* more = arrays.in<double>(offset, n, "offset");
  const double* node = arrays.all<double>(value, &size);
  const double* next = arrays.in<double>(rise, size, "rise");
  arrays.all<double>(values, &room);
  double* out = arrays.out<double>(values, room, "values");
  if (!arrays.fit()) return nullptr;
  const size_t most = n ? room / (3 * n) : 0, at = static_cast<size_t>(step) - 1;
  const size_t begin = at * static_cast<size_t>(num_nodes);
  if (step < 1 || num_nodes < 2 || num_nodes > kMostCells || stride < 1 || most * 3 * n != room ||
      (n && at >= most) || at >= size || begin + static_cast<size_t>(num_nodes) > size) {
    arrays.fail("the step lies outside of the table or of the values");
    return nullptr;
  }
  const size_t rest = size - begin - static_cast<size_t>(num_nodes);
  const tide::NodeTable table{node + begin, next + begin, static_cast<size_t>(num_nodes),
                              first, per_node};
  double* z = out + at * n;
  tide::table_chances(n, given, least, chosen, 1 + rest / static_cast<size_t>(stride),
                      static_cast<size_t>(stride), table, more, z, z + most * n,
                      z + 2 * most * n);
  return Py_NewRef(Py_None);
}

// Costs and classes of a call, or false with an error.
bool round_of(Arrays& arrays, PyObject* target, PyObject* draft, PyObject* chance,
              PyObject* of, PyObject* share, tide::Costs* costs, tide::Classes* classes) {
  size_t half, drafts, bins;
  costs->draft = arrays.all<double>(draft, &drafts);
  arrays.all<double>(share, &half);
  classes->chance = arrays.all<double>(chance, &bins);
  costs->n = half / 2;
  costs->most = drafts - 1;
  classes->num_bins = bins;
  classes->share = arrays.out<double>(share, 2 * costs->n, "share");
  classes->of = arrays.out<int64_t>(of, 2 * costs->n, "class_of");
  if (arrays.fit() && (drafts < 2 || !costs->n || bins < 2))
    return arrays.fail("a round has a request and a draft step at least");
  costs->target = arrays.in<double>(target, costs->n * costs->most + 1, "target");
  return arrays.fit();
}

PyObject* py_forecast(PyObject*, PyObject* args) {
  PyObject *target, *draft, *chance, *of, *share, *slots, *place, *room, *sets;
  Py_ssize_t k;
  int whole;
  double mean, keep, client_share;
  tide::Costs costs{};
  if (!PyArg_ParseTuple(args, "OOdddOOOOOddOOnpd:forecast", &target, &draft, &costs.extra,
                        &costs.limit, &costs.loose, &chance, &of, &share, &slots, &place,
                        &mean, &keep, &room, &sets, &k, &whole, &client_share))
    return nullptr;
  Arrays arrays;
  tide::Classes classes{};
  if (!round_of(arrays, target, draft, chance, of, share, &costs, &classes)) return nullptr;
  tide::Levels levels{nullptr, nullptr, 0, mean, keep};
  size_t size;
  levels.slots = arrays.in<int64_t>(slots, costs.n, "slots");
  levels.place = arrays.all<double>(place, &levels.capacity);
  const int64_t* rooms = arrays.in<int64_t>(room, costs.n, "room");
  const double* tables = arrays.all<double>(sets, &size);
  const size_t each = 2 * static_cast<size_t>(k) * classes.num_bins;
  if (arrays.fit() && (k < 1 || k > kMostCells || costs.most > static_cast<size_t>(k) ||
                       size < 2 * each))
    arrays.fail("the tables have no such position");
  if (!below(arrays, levels.slots, costs.n, levels.capacity)) return nullptr;
  classes.num_classes = size / each;
  const tide::Forecast found =
      tide::forecast(costs, classes, levels, rooms, tables, static_cast<size_t>(k),
                     whole != 0, client_share);
  return Py_BuildValue("ndddi", static_cast<Py_ssize_t>(found.steps), found.tokens,
                       found.seconds, found.free, static_cast<int>(found.loosened));
}

PyObject* py_draft_on(PyObject*, PyObject* args) {
  PyObject *target, *draft, *chance, *of, *share, *values, *depth, *survival, *room;
  PyObject *wanted, *drafted, *gained;
  Py_ssize_t step, k;
  int whole;
  tide::Costs costs{};
  tide::DraftStep at{};
  if (!PyArg_ParseTuple(args, "OOdOOOnOOOOOOOnddp:draft_on", &target, &draft, &costs.limit,
                        &chance, &of, &share, &step, &values, &depth, &survival, &room,
                        &wanted, &drafted, &gained, &k, &at.per_bin, &at.bar, &whole))
    return nullptr;
  Arrays arrays;
  tide::Classes classes{};
  if (!round_of(arrays, target, draft, chance, of, share, &costs, &classes)) return nullptr;
  if (step < 1 || static_cast<size_t>(step) > costs.most) {
    arrays.fail("there is no such step");
    return nullptr;
  }
  const size_t n = costs.n, bins = classes.num_bins;
  at.step = static_cast<size_t>(step);
  at.k = static_cast<size_t>(std::max<Py_ssize_t>(k, 0));
  at.whole = whole != 0;
  size_t size;
  at.chance = arrays.in<double>(values, 3 * costs.most * n, "values");
  at.depth = arrays.out<double>(depth, n, "depth");
  at.survival = arrays.out<float>(survival, costs.most * n, "survival");
  at.room = arrays.in<int64_t>(room, n, "room");
  at.wanted = arrays.in<int64_t>(wanted, n, "wanted");
  at.drafted = arrays.out<double>(drafted, 2 * bins, "drafted");
  at.gained = arrays.all<double>(gained, &size);
  if (!arrays.fit()) return nullptr;
  at.chance += (2 * costs.most + at.step - 1) * n;
  at.survival += (at.step - 1) * n;
  if (at.step < costs.most) {
    const size_t each = at.k > at.step ? (at.k - at.step) * bins : 0;
    if (costs.most > at.k || k > kMostCells || !each || size % each) {
      arrays.fail("the tables have no such position");
      return nullptr;
    }
    classes.num_classes = size / each;
  }
  return PyBool_FromLong(tide::draft_on(costs, classes, at));
}

PyObject* py_convolve(PyObject*, PyObject* args) {
  PyObject *single, *gained;
  Py_ssize_t k, num_bins;
  if (!PyArg_ParseTuple(args, "OOnn:convolve", &single, &gained, &k, &num_bins))
    return nullptr;
  if (k < 1 || num_bins < 1 || k > kMostCells || num_bins > kMostCells) {
    PyErr_SetString(PyExc_ValueError, "there are no positions or no bins");
    return nullptr;
  }
  Arrays arrays;
  size_t size;
  const size_t positions = static_cast<size_t>(k), bins = static_cast<size_t>(num_bins);
  const double* from = arrays.all<double>(single, &size);
  if (size % (positions * bins)) arrays.fail("single is no array of whole classes");
  double* to = arrays.out<double>(gained, size * (positions + 1) / 2, "gained");
  if (!arrays.fit()) return nullptr;
  tide::convolve(from, size / (positions * bins), positions, bins, to);
  return Py_NewRef(Py_None);
}

PyObject* py_learn_levels(PyObject*, PyObject* args) {
  PyObject *slots, *logits, *chances, *drafted, *level, *place, *variance, *fall, *counts;
  PyObject *chance, *knobs;
  tide::Filter filter{};
  if (!PyArg_ParseTuple(args, "OOOOOOOOOOddO:learn_levels", &slots, &logits, &chances,
                        &drafted, &level, &place, &variance, &fall, &counts, &chance,
                        &filter.mean, &filter.keep, &knobs))
    return nullptr;
  Arrays arrays;
  size_t n, tokens, size;
  const int64_t* who = arrays.all<int64_t>(slots, &n);
  const uint8_t* there = arrays.all<uint8_t>(drafted, &tokens);
  const double* odds = arrays.in<double>(logits, tokens, "logits");
  const double* given = arrays.in<double>(chances, tokens, "chance");
  arrays.all<double>(level, &filter.capacity);
  arrays.all<double>(fall, &filter.k);
  arrays.all<double>(counts, &size);
  filter.chance = arrays.all<double>(chance, &filter.num_bins);
  filter.level = arrays.out<double>(level, filter.capacity, "level");
  filter.place = arrays.out<double>(place, filter.capacity, "place");
  filter.variance = arrays.out<double>(variance, filter.capacity, "variance");
  filter.fall = arrays.out<double>(fall, filter.k, "fall");
  filter.counts = arrays.out<double>(counts, size, "counts");
  const double* knob = arrays.in<double>(knobs, 10, "knobs");
  const size_t each = filter.k * filter.num_bins, steps = n ? tokens / n : 0;
  if (arrays.fit() && (filter.num_bins < 3 || !each || size < 2 * each || size % each ||
                       steps * n != tokens || steps > filter.k))
    arrays.fail("the counts have no such position");
  if (!below(arrays, who, n, filter.capacity)) return nullptr;
  filter.num_classes = size / each;
  double* const to[] = {&filter.half_life, &filter.sure,      &filter.mean_tokens,
                        &filter.between,   &filter.within,    &filter.drift,
                        &filter.fall_tokens, &filter.first,   &filter.per_level,
                        &filter.per_bin};
  for (size_t i = 0; i < 10; ++i) *to[i] = knob[i];
  const bool any = tide::learn_levels(filter, n, steps, who, odds, given, there);
  return Py_BuildValue("di", filter.mean, static_cast<int>(any));
}

PyObject* py_judge(PyObject*, PyObject* args) {
  PyObject *values, *survival, *rows, *verified, *accepted, *slots, *offset, *precision;
  PyObject *where, *labels;
  Py_ssize_t steps;
  tide::Round round{};
  if (!PyArg_ParseTuple(args, "OOnOOOOOOdddOO:judge", &values, &survival, &steps, &rows,
                        &verified, &accepted, &slots, &offset, &precision, &round.keep,
                        &round.prior, &round.limit, &where, &labels))
    return nullptr;
  Arrays arrays;
  size_t size, capacity;
  round.survival = arrays.all<float>(survival, &size);
  round.values = arrays.in<double>(values, 3 * size, "values");
  round.rows = arrays.all<int64_t>(rows, &round.num_rows);
  round.verified = arrays.in<int64_t>(verified, round.num_rows, "verified");
  round.accepted = arrays.in<int64_t>(accepted, round.num_rows, "accepted");
  round.slots = arrays.all<int64_t>(slots, &round.n);
  arrays.all<double>(offset, &capacity);
  round.offset = arrays.out<double>(offset, capacity, "offset");
  round.precision = arrays.out<double>(precision, capacity, "precision");
  round.most = round.n ? size / round.n : 0;
  round.steps = static_cast<size_t>(std::max<Py_ssize_t>(steps, 0));
  if (arrays.fit() && (round.most * round.n != size || round.steps > round.most))
    arrays.fail("there is no such step");
  const size_t most = round.steps * round.n;
  tide::Labels out{};
  out.position = arrays.out<int64_t>(where, 2 * most, "where");
  out.z = arrays.out<double>(labels, 3 * most, "labels");
  if (!below(arrays, round.rows, round.num_rows, round.n) ||
      !below(arrays, round.slots, round.n, capacity))
    return nullptr;
  out.row = out.position + most;
  out.predicted = out.z + most;
  out.hit = out.z + 2 * most;
  tide::judge(round, out);
  return Py_BuildValue("nd", static_cast<Py_ssize_t>(out.count), out.tokens);
}

PyObject* py_best_set(PyObject*, PyObject* args) {
  PyObject *order, *survival, *seconds, *lengths;
  double plain_tokens, limit, bar;
  if (!PyArg_ParseTuple(args, "OOdOddO:best_set", &order, &survival, &plain_tokens,
                        &seconds, &limit, &bar, &lengths))
    return nullptr;
  Arrays arrays;
  size_t count, size, bytes;
  const float* sorted = arrays.all<float>(order, &count);
  const float* given = arrays.in<float>(survival, count, "survival");
  const double* spent = arrays.all<double>(seconds, &size);
  arrays.all<int64_t>(lengths, &bytes);
  int64_t* out = arrays.out<int64_t>(lengths, bytes, "lengths");
  if (arrays.fit() && (size <= count || (bytes ? count % bytes : count)))
    arrays.fail("fewer seconds than sets, or lengths of other requests");
  if (!arrays.fit()) return nullptr;
  const tide::Chosen best =
      tide::best_set(sorted, count, given, bytes ? count / bytes : 0, bytes, plain_tokens,
                     spent, limit, bar, out);
  return Py_BuildValue("ndd", static_cast<Py_ssize_t>(best.total), best.tokens,
                       best.seconds);
}

PyObject* py_ngram_propose(PyObject*, PyObject* args) {
  PyObject *last, *tokens, *length, *indexed, *factors, *slots, *known, *count, *fresh;
  PyObject *proposed, *match;
  Py_ssize_t bits, most_match, chunk;
  if (!PyArg_ParseTuple(args, "OOOOOnnOOOOOOn:ngram_propose", &last, &tokens, &length,
                        &indexed, &factors, &bits, &most_match, &slots, &known, &count,
                        &fresh, &proposed, &match, &chunk))
    return nullptr;
  Arrays arrays;
  size_t capacity, n, all, sized, given;
  tide::NgramIndex index{};
  tide::NewTokens step{};
  step.slots = arrays.all<int64_t>(slots, &n);
  arrays.all<int64_t>(length, &capacity);
  arrays.all<int32_t>(tokens, &all);
  arrays.all<int32_t>(fresh, &given);
  arrays.all<int64_t>(proposed, &sized);
  const size_t width = capacity ? all / capacity : 0, w = n ? given / n : 0;
  const size_t most = n ? sized / n : 0;
  if (arrays.fit() && (bits < 1 || bits > 30 || most_match < tide::kLongest ||
                       width < static_cast<size_t>(most_match) || width > INT_MAX))
    arrays.fail("there is no room for a text in the index");
  const size_t cells = arrays.fit() ? tide::kNumOrders * capacity << bits : 0;
  index.last = arrays.out<int32_t>(last, cells, "last");
  index.tokens = arrays.out<int32_t>(tokens, capacity * width, "tokens");
  index.length = arrays.out<int64_t>(length, capacity, "length");
  index.indexed = arrays.out<int64_t>(indexed, capacity, "indexed");
  index.factors = arrays.in<uint64_t>(factors, tide::kLongest, "factors");
  step.known = arrays.in<int64_t>(known, n, "known");
  step.count = arrays.in<int64_t>(count, n, "count");
  step.fresh = arrays.in<int32_t>(fresh, n * w, "fresh");
  int64_t* to = arrays.out<int64_t>(proposed, n * most, "proposed");
  int64_t* runs = arrays.out<int64_t>(match, n, "match");
  if (!arrays.fit()) return nullptr;
  index.capacity = capacity;
  index.width = static_cast<int64_t>(width);
  index.most_match = most_match;
  index.bits = static_cast<int>(bits);
  step.n = n;
  step.w = w;
  if (!tide::fits(index, step)) {
    PyErr_SetString(PyExc_ValueError, "a slot or a text lies outside of the index");
    return nullptr;
  }
  tide::propose(index, step, chunk, most, to, runs);
  return Py_NewRef(Py_None);
}

}  // namespace

PyMethodDef tide::control_methods[] = {
    {"table_chances", py_table_chances, METH_VARARGS,
     "Log-odds of confidences, and what a table says of them."},
    {"forecast", py_forecast, METH_VARARGS, "The best round with a draft step."},
    {"draft_on", py_draft_on, METH_VARARGS, "Whether another draft step pays."},
    {"convolve", py_convolve, METH_VARARGS, "Survival over several draft positions."},
    {"learn_levels", py_learn_levels, METH_VARARGS, "Take a round's draft tokens."},
    {"judge", py_judge, METH_VARARGS, "Labels of what the target judged."},
    {"best_set", py_best_set, METH_VARARGS, "The verified set of most value."},
    {"ngram_propose", py_ngram_propose, METH_VARARGS,
     "Index what is new of texts, and look their ends up."},
    {nullptr, nullptr, 0, nullptr},
};
