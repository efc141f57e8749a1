// Python bindings of control's decisions (control.h) and the memory's lookups (ngram.h).
// Type, size and indices of each NumPy array are checked.
#include "bindings.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "control.h"
#include "ngram.h"

namespace {

using tide::Buffer;

// Format characters of Python's struct for a Value.
template <typename Value>
constexpr const char* kFormats = "";
template <>
constexpr const char* kFormats<bool> = "?";
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

// Set `values` to a buffer of `count` values; return false with an error otherwise.
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

// The arrays of one call. The first invalid one raises an error; later ones are null.
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
  // An array of any size.
  template <typename Value>
  const Value* all(PyObject* object, size_t* count) {
    const Value* values = take<Value>(object, PyBUF_FORMAT, kAny, "an array");
    *count = values == nullptr ? 0 : buffers_[used_ - 1].size() / sizeof(Value);
    return values;
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
    const Value* values = nullptr;
    if (!fit_) return nullptr;
    Buffer& buffer = buffers_[used_++];
    fit_ = buffer.acquire(object, flags);
    if (fit_ && count == kAny) count = buffer.size() / sizeof(Value);
    fit_ = fit_ && values_of(buffer, count, what, &values);
    return fit_ && values == nullptr ? none : values;
  }

  Buffer buffers_[16];
  size_t used_ = 0;
  bool fit_ = true;
};

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
    arrays.fail("fewer seconds than sets, or lengths for another number of requests");
  if (!arrays.fit()) return nullptr;
  const tide::Chosen best =
      tide::best_set(sorted, count, given, bytes ? count / bytes : 0, bytes, plain_tokens,
                     spent, limit, bar, out);
  return Py_BuildValue("ndd", static_cast<Py_ssize_t>(best.total), best.tokens,
                       best.seconds);
}

PyObject* py_survival(PyObject*, PyObject* args) {
  PyObject *confidence, *slots, *sampled, *room, *knots, *curves, *requests, *logits, *out;
  if (!PyArg_ParseTuple(args, "OOOOOOOOO:survival", &confidence, &slots, &sampled, &room,
                        &knots, &curves, &requests, &logits, &out))
    return nullptr;
  Arrays arrays;
  size_t all, cells, capacity;
  tide::Drafts drafts{};
  drafts.confidence = arrays.all<float>(confidence, &all);
  drafts.slots = arrays.all<int64_t>(slots, &drafts.n);
  drafts.sampled = arrays.in<bool>(sampled, drafts.n, "sampled");
  drafts.room = arrays.in<int64_t>(room, drafts.n, "room");
  const double* at = arrays.all<double>(knots, &cells);
  const double* values = arrays.in<double>(curves, 2 * cells, "curves");
  const double* own = arrays.all<double>(requests, &capacity);
  double* odds = arrays.out<double>(logits, all, "logits");
  float* found = arrays.out<float>(out, all, "survival");
  if (arrays.fit() && (cells < 2 || (drafts.n ? all % drafts.n : all)))
    arrays.fail("no curve, or confidences for another number of requests");
  for (size_t i = 0; arrays.fit() && i < drafts.n; ++i)
    if (drafts.slots[i] < 0 || drafts.slots[i] >= static_cast<int64_t>(capacity))
      arrays.fail("a slot is not used by any request");
  if (!arrays.fit()) return nullptr;
  drafts.steps = drafts.n ? all / drafts.n : 0;
  tide::survival(drafts, at, values, cells, own, odds, found);
  return Py_NewRef(Py_None);
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
    arrays.fail("the index is too small for a text");
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
    PyErr_SetString(PyExc_ValueError, "a slot or a text is outside the index");
    return nullptr;
  }
  tide::propose(index, step, chunk, most, to, runs);
  return Py_NewRef(Py_None);
}

}  // namespace

PyMethodDef tide::control_methods[] = {
    {"best_set", py_best_set, METH_VARARGS, "Find the verified set of the highest value."},
    {"survival", py_survival, METH_VARARGS, "Compute survival of draft tokens."},
    {"ngram_propose", py_ngram_propose, METH_VARARGS,
     "Index new tokens of texts, and look up the continuations of their ends."},
    {nullptr, nullptr, 0, nullptr},
};
