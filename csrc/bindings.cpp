// vllm_tide._shm: shm.h for Python, in the limited API (one build for 3.11 and later).
// Every offset is checked against its buffer here; the types are in _shm.pyi.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API  // setup.py says it too, so that setuptools names the file
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <vector>

#include "control.h"
#include "ngram.h"
#include "shm.h"

namespace {

// Below this, giving up the interpreter lock costs more than the work.
constexpr size_t kReleaseLockBytes = 64 * 1024;

// Parts of a gathered copy start at multiples of this.
constexpr size_t kPartAlign = 8;

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  bool acquire(PyObject* object, int flags) {
    held_ = PyObject_GetBuffer(object, &view_, flags) == 0;
    return held_;
  }
  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

bool expect_arguments(const char* name, Py_ssize_t given, Py_ssize_t low, Py_ssize_t high) {
  if (given >= low && given <= high) return true;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd to %zd arguments, not %zd", name, low, high,
               given);
  return false;
}

bool to_u64(PyObject* object, uint64_t* value) {
  *value = PyLong_AsUnsignedLongLong(object);
  return !(*value == static_cast<uint64_t>(-1) && PyErr_Occurred());
}

bool to_crc(PyObject* object, uint32_t* value) {
  uint64_t wide;
  if (!to_u64(object, &wide)) return false;
  if (wide > 0xFFFFFFFFu) {
    PyErr_SetString(PyExc_OverflowError, "a CRC has 32 bits");
    return false;
  }
  *value = static_cast<uint32_t>(wide);
  return true;
}

// The address of the word at `offset`, or null with ValueError.
uint8_t* word_at(const Buffer& buffer, PyObject* offset) {
  const Py_ssize_t at = PyLong_AsSsize_t(offset);
  if (at == -1 && PyErr_Occurred()) return nullptr;
  if (at < 0 || buffer.size() < 8 || static_cast<size_t>(at) > buffer.size() - 8) {
    PyErr_Format(PyExc_ValueError, "word at %zd lies outside a buffer of %zu bytes", at,
                 buffer.size());
    return nullptr;
  }
  uint8_t* address = buffer.data() + at;
  if (reinterpret_cast<uintptr_t>(address) % 8 != 0) {
    PyErr_Format(PyExc_ValueError, "word at %zd is not 8-byte aligned", at);
    return nullptr;
  }
  return address;
}

PyObject* py_shm_create(PyObject*, PyObject* args) {
  const char* name;
  long long size;
  if (!PyArg_ParseTuple(args, "sL:shm_create", &name, &size)) return nullptr;
  if (size <= 0) {
    PyErr_SetString(PyExc_ValueError, "a segment needs at least one byte");
    return nullptr;
  }
  int fd;
  Py_BEGIN_ALLOW_THREADS
  fd = tide::create_segment(name, size);
  Py_END_ALLOW_THREADS
  if (fd < 0) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, name);
  return PyLong_FromLong(fd);
}

PyObject* py_shm_open(PyObject*, PyObject* args) {
  const char* name;
  if (!PyArg_ParseTuple(args, "s:shm_open", &name)) return nullptr;
  const int fd = tide::open_segment(name);
  if (fd < 0) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, name);
  return PyLong_FromLong(fd);
}

PyObject* py_shm_unlink(PyObject*, PyObject* args) {
  const char* name;
  if (!PyArg_ParseTuple(args, "s:shm_unlink", &name)) return nullptr;
  if (tide::unlink_segment(name) != 0)
    return PyErr_SetFromErrnoWithFilename(PyExc_OSError, name);
  return Py_NewRef(Py_None);
}

PyObject* py_fd_size(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("fd_size", count, 1, 1)) return nullptr;
  const long fd = PyLong_AsLong(args[0]);
  if (fd == -1 && PyErr_Occurred()) return nullptr;
  if (fd < 0 || fd > INT_MAX) {  // cut to an int, it could name another descriptor
    errno = EBADF;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  const int64_t size = tide::descriptor_size(static_cast<int>(fd));
  if (size < 0) return PyErr_SetFromErrno(PyExc_OSError);
  return PyLong_FromLongLong(size);
}

PyObject* py_load(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("load", count, 2, 2)) return nullptr;
  Buffer buffer;
  if (!buffer.acquire(args[0], PyBUF_SIMPLE)) return nullptr;
  const uint8_t* address = word_at(buffer, args[1]);
  if (address == nullptr) return nullptr;
  return PyLong_FromUnsignedLongLong(tide::load_acquire(address));
}

PyObject* py_store(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("store", count, 3, 3)) return nullptr;
  Buffer buffer;
  uint64_t value;
  if (!buffer.acquire(args[0], PyBUF_WRITABLE) || !to_u64(args[2], &value)) return nullptr;
  uint8_t* address = word_at(buffer, args[1]);
  if (address == nullptr) return nullptr;
  tide::store_release(address, value);
  return Py_NewRef(Py_None);
}

PyObject* py_fetch_add(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("fetch_add", count, 3, 3)) return nullptr;
  Buffer buffer;
  uint64_t delta;
  if (!buffer.acquire(args[0], PyBUF_WRITABLE) || !to_u64(args[2], &delta)) return nullptr;
  uint8_t* address = word_at(buffer, args[1]);
  if (address == nullptr) return nullptr;
  return PyLong_FromUnsignedLongLong(tide::fetch_add(address, delta));
}

PyObject* py_compare_exchange(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("compare_exchange", count, 4, 4)) return nullptr;
  Buffer buffer;
  uint64_t expected;
  uint64_t desired;
  if (!buffer.acquire(args[0], PyBUF_WRITABLE) || !to_u64(args[2], &expected) ||
      !to_u64(args[3], &desired))
    return nullptr;
  uint8_t* address = word_at(buffer, args[1]);
  if (address == nullptr) return nullptr;
  return PyBool_FromLong(tide::compare_exchange(address, expected, desired));
}

using Checksum = uint32_t (*)(uint32_t, const void*, size_t);

PyObject* checksum(const char* name, Checksum function, PyObject* const* args,
                   Py_ssize_t count) {
  if (!expect_arguments(name, count, 1, 2)) return nullptr;
  Buffer buffer;
  uint32_t crc = 0;
  if (!buffer.acquire(args[0], PyBUF_SIMPLE)) return nullptr;
  if (count == 2 && !to_crc(args[1], &crc)) return nullptr;
  if (buffer.size() < kReleaseLockBytes) {
    crc = function(crc, buffer.data(), buffer.size());
  } else {
    Py_BEGIN_ALLOW_THREADS
    crc = function(crc, buffer.data(), buffer.size());
    Py_END_ALLOW_THREADS
  }
  return PyLong_FromUnsignedLong(crc);
}

PyObject* py_crc32c(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return checksum("crc32c", tide::crc32c, args, count);
}

PyObject* py_crc32c_table(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return checksum("crc32c_table", tide::crc32c_table, args, count);
}

PyObject* py_crc32c_is_hardware(PyObject*, PyObject*) {
  return PyBool_FromLong(tide::crc32c_is_hardware());
}

// One part: its bytes, then zeros up to the next multiple of kPartAlign.
uint32_t copy_part(uint32_t crc, uint8_t* target, const Buffer& part, size_t padded) {
  static const uint8_t zeros[kPartAlign] = {};
  crc = tide::copy_crc32c(crc, target, part.data(), part.size());
  return tide::copy_crc32c(crc, target + part.size(), zeros, padded - part.size());
}

PyObject* py_gather(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("gather", count, 3, 3)) return nullptr;
  Buffer target;
  if (!target.acquire(args[0], PyBUF_WRITABLE)) return nullptr;
  const Py_ssize_t offset = PyLong_AsSsize_t(args[1]);
  if (offset == -1 && PyErr_Occurred()) return nullptr;
  if (offset < 0 || static_cast<size_t>(offset) > target.size()) {
    PyErr_Format(PyExc_ValueError, "offset %zd lies outside a buffer of %zu bytes", offset,
                 target.size());
    return nullptr;
  }
  if (!PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "the parts of a gather are a tuple of buffers");
    return nullptr;
  }
  size_t at = static_cast<size_t>(offset);
  uint32_t crc = 0;
  const Py_ssize_t num_parts = PyTuple_Size(args[2]);
  for (Py_ssize_t i = 0; i < num_parts; ++i) {
    Buffer part;
    if (!part.acquire(PyTuple_GetItem(args[2], i), PyBUF_SIMPLE)) return nullptr;
    const size_t padded = (part.size() + kPartAlign - 1) / kPartAlign * kPartAlign;
    if (padded > target.size() - at) {
      PyErr_Format(PyExc_ValueError, "part %zd does not fit: %zu bytes, room for %zu", i,
                   padded, target.size() - at);
      return nullptr;
    }
    if (part.size() < kReleaseLockBytes) {
      crc = copy_part(crc, target.data() + at, part, padded);
    } else {
      Py_BEGIN_ALLOW_THREADS
      crc = copy_part(crc, target.data() + at, part, padded);
      Py_END_ALLOW_THREADS
    }
    at += padded;
  }
  return PyLong_FromUnsignedLong(crc);
}

// Part `span` of `source`, or false with ValueError.
bool part_of(const Buffer& source, const uint8_t* span, tide::Part* part) {
  uint64_t at;
  uint64_t size;
  std::memcpy(&at, span, 8);
  std::memcpy(&size, span + 8, 8);
  if (at > source.size() || size > source.size() - at) {
    PyErr_Format(PyExc_ValueError, "a span lies outside a buffer of %zu bytes",
                 source.size());
    return false;
  }
  *part = {source.data() + at, static_cast<size_t>(size)};
  return true;
}

// The ring and where its producer is, or false with ValueError.
bool ring_of(const Buffer& memory, const Buffer& end, tide::Ring* ring) {
  const bool whole = memory.size() > tide::kDataAt &&
                     (memory.size() - tide::kDataAt) % tide::kLineBytes == 0 &&
                     reinterpret_cast<uintptr_t>(memory.data()) % 8 == 0;
  const bool words = end.size() == sizeof(tide::RingEnd) &&
                     reinterpret_cast<uintptr_t>(end.data()) % 8 == 0;
  if (!whole || !words) {
    PyErr_SetString(PyExc_ValueError, "a ring of whole lines and two words are wanted");
    return false;
  }
  const uint64_t head = tide::load_acquire(end.data());
  const uint64_t tail = tide::load_acquire(end.data() + 8);
  if (head % tide::kLineBytes != 0 || head < tail ||
      head - tail > memory.size() - tide::kDataAt) {
    PyErr_SetString(PyExc_ValueError, "the producer is nowhere in its ring");
    return false;
  }
  ring->memory = memory.data();
  ring->size = memory.size();
  return true;
}

PyObject* py_write_frames(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments("write_frames", count, 8, 8)) return nullptr;
  Buffer memory, end, metas, spans, follows, status;
  const long fd = PyLong_AsLong(args[1]);
  if (fd == -1 && PyErr_Occurred()) return nullptr;
  if (!memory.acquire(args[0], PyBUF_WRITABLE) || !end.acquire(args[2], PyBUF_WRITABLE) ||
      !metas.acquire(args[3], PyBUF_SIMPLE) || !spans.acquire(args[4], PyBUF_SIMPLE) ||
      !follows.acquire(args[5], PyBUF_SIMPLE) || !status.acquire(args[6], PyBUF_WRITABLE))
    return nullptr;
  tide::Ring ring{nullptr, 0, fd < 0 || fd > INT_MAX ? -1 : static_cast<int>(fd)};
  if (!ring_of(memory, end, &ring)) return nullptr;
  if (!PyTuple_Check(args[7])) {
    PyErr_SetString(PyExc_TypeError, "the sources of records are a tuple of buffers");
    return nullptr;
  }
  const size_t num_records = status.size();
  const size_t num_sources = static_cast<size_t>(PyTuple_Size(args[7]));
  if (metas.size() != num_records * tide::kMetaBytes || follows.size() != num_records ||
      spans.size() != num_records * num_sources * 16) {
    PyErr_Format(PyExc_ValueError, "the arrays of %zu records differ in length",
                 num_records);
    return nullptr;
  }
  std::vector<Buffer> sources(num_sources);
  for (size_t j = 0; j < num_sources; ++j)
    if (!sources[j].acquire(PyTuple_GetItem(args[7], j), PyBUF_SIMPLE)) return nullptr;
  std::vector<tide::Part> parts(num_records * num_sources);
  size_t num_bytes = metas.size();
  for (size_t k = 0; k < parts.size(); ++k) {
    if (!part_of(sources[k % num_sources], spans.data() + 16 * k, &parts[k]))
      return nullptr;
    num_bytes += parts[k].size;
  }
  const tide::Frames frames{num_records, metas.data(), parts.data(), num_sources,
                            follows.data()};
  auto* where = reinterpret_cast<tide::RingEnd*>(end.data());
  if (num_bytes < kReleaseLockBytes) {
    tide::write_frames(ring, where, frames, status.data());
  } else {
    Py_BEGIN_ALLOW_THREADS
    tide::write_frames(ring, where, frames, status.data());
    Py_END_ALLOW_THREADS
  }
  return Py_NewRef(Py_None);
}

// A buffer of `count` values, or false with ValueError.
template <typename Value>
bool values_of(const Buffer& buffer, size_t count, const char* what, const Value** values) {
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
    return take<Value>(object, PyBUF_SIMPLE, count, what);
  }
  template <typename Value>
  Value* out(PyObject* object, size_t count, const char* what) {
    return const_cast<Value*>(take<Value>(object, PyBUF_WRITABLE, count, what));
  }
  // As many as there are.
  template <typename Value>
  const Value* all(PyObject* object, size_t* count) {
    const Value* found = take<Value>(object, PyBUF_SIMPLE, kAny, "an array");
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

template <typename Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"shm_create", py_shm_create, METH_VARARGS, "Create a segment exclusively; its fd."},
    {"shm_open", py_shm_open, METH_VARARGS, "Open a segment for reading and writing."},
    {"shm_unlink", py_shm_unlink, METH_VARARGS, "Remove a segment's name."},
    {"fd_size", method(py_fd_size), METH_FASTCALL, "Bytes behind a descriptor now."},
    {"load", method(py_load), METH_FASTCALL, "Load a u64 word, acquire."},
    {"store", method(py_store), METH_FASTCALL, "Store a u64 word, release."},
    {"fetch_add", method(py_fetch_add), METH_FASTCALL, "Add to a u64 word; the old value."},
    {"compare_exchange", method(py_compare_exchange), METH_FASTCALL,
     "Replace a u64 word if it is as expected."},
    {"crc32c", method(py_crc32c), METH_FASTCALL, "CRC-32C of a buffer."},
    {"crc32c_table", method(py_crc32c_table), METH_FASTCALL, "The portable CRC-32C."},
    {"crc32c_is_hardware", py_crc32c_is_hardware, METH_NOARGS,
     "Whether crc32c runs on the processor's instruction."},
    {"gather", method(py_gather), METH_FASTCALL,
     "Copy buffers one after another, 8-byte aligned; CRC-32C of what was written."},
    {"write_frames", method(py_write_frames), METH_FASTCALL,
     "Write records into a ring; what became of each goes to `status`."},
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

PyModuleDef_Slot slots[] = {{0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "vllm_tide._shm", "Shared memory, atomic words, CRC-32C.", 0,
    methods,               slots,            nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__shm(void) { return PyModuleDef_Init(&definition); }
