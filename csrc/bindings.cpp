// vllm_tide._shm: Python bindings of shm.h, in the limited API (one build for 3.11 and
// later). Every offset is checked against its buffer; the types are in _shm.pyi.
#include "bindings.h"

#include <cerrno>
#include <climits>
#include <cstring>
#include <vector>

#include "shm.h"
#include "step.h"

namespace {

using tide::Buffer;
using tide::method;

// Below this size, releasing the GIL costs more than the operation.
constexpr size_t kReleaseLockBytes = 64 * 1024;

// Alignment of the parts of a gathered copy (bytes).
constexpr size_t kPartAlign = 8;

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

// Return the address of the word at `offset`, or null with a ValueError.
uint8_t* word_at(const Buffer& buffer, PyObject* offset) {
  const Py_ssize_t at = PyLong_AsSsize_t(offset);
  if (at == -1 && PyErr_Occurred()) return nullptr;
  if (at < 0 || buffer.size() < 8 || static_cast<size_t>(at) > buffer.size() - 8) {
    PyErr_Format(PyExc_ValueError, "word at %zd is outside a buffer of %zu bytes", at,
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
  if (fd < 0 || fd > INT_MAX) {  // truncated to int, it could be another descriptor
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

// Copy a part, followed by zeros up to the next multiple of kPartAlign.
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
    PyErr_Format(PyExc_ValueError, "offset %zd is outside a buffer of %zu bytes", offset,
                 target.size());
    return nullptr;
  }
  if (!PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "the parts of a gather must be a tuple of buffers");
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
      PyErr_Format(PyExc_ValueError, "part %zd does not fit: %zu bytes, %zu available", i,
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

// Set `part` to a span of `source`; return false with a ValueError if it is invalid.
bool part_of(const Buffer& source, const uint8_t* span, tide::Part* part) {
  uint64_t at;
  uint64_t size;
  std::memcpy(&at, span, 8);
  std::memcpy(&size, span + 8, 8);
  if (at > source.size() || size > source.size() - at) {
    PyErr_Format(PyExc_ValueError, "a span is outside a buffer of %zu bytes",
                 source.size());
    return false;
  }
  *part = {source.data() + at, static_cast<size_t>(size)};
  return true;
}

// Set `ring` from its buffers; return false with a ValueError if they are invalid.
bool ring_of(const Buffer& memory, const Buffer& end, tide::Ring* ring) {
  const bool whole = memory.size() > tide::kDataAt &&
                     (memory.size() - tide::kDataAt) % tide::kLineBytes == 0 &&
                     reinterpret_cast<uintptr_t>(memory.data()) % 8 == 0;
  const bool words = end.size() == sizeof(tide::RingEnd) &&
                     reinterpret_cast<uintptr_t>(end.data()) % 8 == 0;
  if (!whole || !words) {
    PyErr_SetString(PyExc_ValueError, "expected a ring of whole cache lines and two words");
    return false;
  }
  const uint64_t head = tide::load_acquire(end.data());
  const uint64_t tail = tide::load_acquire(end.data() + 8);
  if (head % tide::kLineBytes != 0 || head < tail ||
      head - tail > memory.size() - tide::kDataAt) {
    PyErr_SetString(PyExc_ValueError, "the producer's position is outside its ring");
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
    PyErr_SetString(PyExc_TypeError, "the sources of records must be a tuple of buffers");
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

template <typename Value>
PyObject* bytes_of(const std::vector<Value>& values) {
  return PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                       static_cast<Py_ssize_t>(values.size() * sizeof(Value)));
}

PyObject* py_lay_out(PyObject*, PyObject* args) {
  PyObject* given;
  PyObject* row_bytes;
  tide::StepFacts step{};
  unsigned long long version, drafted_by;
  long long max_rows;
  int taught;
  tide::Meta& meta = step.meta;
  static_assert(sizeof(tide::Meta) == tide::kMetaBytes && sizeof(tide::Request) == 120);
  if (!PyArg_ParseTuple(args, "OKKIbbbIIIiLO!:lay_out", &given, &version, &drafted_by,
                        &meta.concurrency, &meta.dtype, &meta.format, &meta.flags,
                        &meta.feature_width, &meta.hidden_width, &meta.topk, &taught,
                        &max_rows, &PyTuple_Type, &row_bytes))
    return nullptr;
  Buffer requests;
  if (!requests.acquire(given, PyBUF_SIMPLE)) return nullptr;
  if (requests.size() % sizeof(tide::Request) != 0 || taught < 0 || taught > 2) {
    PyErr_SetString(PyExc_ValueError, "expected complete requests and a valid kind of teacher");
    return nullptr;
  }
  meta.draft_version = version;
  step.drafted_by = drafted_by;
  step.taught = static_cast<tide::Taught>(taught);
  step.max_rows = max_rows;
  for (Py_ssize_t i = 0; i < PyTuple_Size(row_bytes); ++i)
    step.row_bytes.push_back(PyLong_AsLongLong(PyTuple_GetItem(row_bytes, i)));
  if (PyErr_Occurred()) return nullptr;
  const tide::Layout layout =
      tide::lay_out(reinterpret_cast<const tide::Request*>(requests.data()),
                    requests.size() / sizeof(tide::Request), step);
  return Py_BuildValue("NNNNN", bytes_of(layout.metas), bytes_of(layout.spans),
                       bytes_of(layout.follows), bytes_of(layout.sound),
                       bytes_of(layout.of));
}

PyMethodDef methods[] = {
    {"shm_create", py_shm_create, METH_VARARGS, "Create a segment exclusively; return its fd."},
    {"shm_open", py_shm_open, METH_VARARGS, "Open a segment for reading and writing."},
    {"shm_unlink", py_shm_unlink, METH_VARARGS, "Unlink a segment."},
    {"fd_size", method(py_fd_size), METH_FASTCALL, "Return the size of a file (bytes)."},
    {"load", method(py_load), METH_FASTCALL, "Load a u64 word, acquire."},
    {"store", method(py_store), METH_FASTCALL, "Store a u64 word, release."},
    {"fetch_add", method(py_fetch_add), METH_FASTCALL, "Fetch a u64 word and add to it."},
    {"crc32c", method(py_crc32c), METH_FASTCALL, "Return the CRC-32C of a buffer."},
    {"crc32c_table", method(py_crc32c_table), METH_FASTCALL,
     "Return the CRC-32C of a buffer, computed by the portable code."},
    {"crc32c_is_hardware", py_crc32c_is_hardware, METH_NOARGS,
     "Return whether crc32c uses the CPU instruction."},
    {"gather", method(py_gather), METH_FASTCALL,
     "Copy buffers consecutively, 8-byte aligned; return the CRC-32C of the copy."},
    {"write_frames", method(py_write_frames), METH_FASTCALL,
     "Write records into a ring; store the outcome of each in `status`."},
    {"lay_out", py_lay_out, METH_VARARGS, "Return the records of a step and their spans."},
    {nullptr, nullptr, 0, nullptr},
};

int add_control(PyObject* module) {
  return PyModule_AddFunctions(module, tide::control_methods);
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(add_control)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "vllm_tide._shm", "Shared memory, atomic words, CRC-32C.", 0,
    methods,               slots,            nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__shm(void) { return PyModuleDef_Init(&definition); }
