// Common to both parts of vllm_tide._shm: Python's limited API and its buffers.
#pragma once
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API  // also in setup.py, so that setuptools names the file
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace tide {

// Functions of control and of the memory; null-terminated.
extern PyMethodDef control_methods[];

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
  // A format character of Python's struct if PyBUF_FORMAT was requested; null for bytes.
  const char* format() const { return view_.format; }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

template <typename Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace tide
