// Arrays as the hot path from Python sees them, without Python code: NumPy arrays, and tensors of
// libraries with DLPack's C exchange API (PyTorch from 2.10 on).
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "memory/heap.h"

namespace pycoll {

enum class Place : uint64_t { kAbsent, kPrivate, kSymmetric, kRegistered };

// What must be the same of two arrays for a call with one to be like a call with the other. All of
// its bytes count, see CallKey; dims beyond ndim are 0.
struct ArrayKey {
  static constexpr int kMaxDims = 6;

  PyObject* type = nullptr;  // the dtype of a NumPy array, the type of a tensor
  uint32_t element = 0;      // DLPack's type code and bits of a tensor; 0 for NumPy
  int32_t ndim = 0;
  Place place = Place::kAbsent;
  std::array<Py_ssize_t, kMaxDims> dims{};

  // Wherever both lie.
  bool is_like(const ArrayKey& other) const {
    return type == other.type && element == other.element && ndim == other.ndim &&
           dims == other.dims;
  }
  bool operator==(const ArrayKey& other) const { return place == other.place && is_like(other); }
};

struct ArrayMemory {
  char* data = nullptr;
  uint64_t nbytes = 0;
  bool scattered = false;  // not contiguous; see packed()
};

// The seconds that a call may wait, negative for those of the engine; nothing for what Python code
// must look at.
std::optional<double> limit_of(PyObject* timeout);

// Describes one array argument; false if only Python code can serve it. `written`: it is a result.
// Of None it describes nothing.
bool describe_array(const Heap* heap, PyObject* object, bool written, ArrayKey& key,
                    ArrayMemory& memory);

// Address and bytes of a NumPy array that is one stretch of memory, and may be written to if that
// is asked for; nothing of anything else.
std::optional<std::pair<uintptr_t, uint64_t>> stretch(const pybind11::handle& x, bool written);

// Whether this is a bool, int, float or complex of Python's.
bool is_python_number(PyObject* x);

// Whether this is memory of Python's own that NumPy makes an array of without a copy.
bool is_buffer(PyObject* x);

// A new array of such a number, as pycoll/runtime/arrays/numbers.py makes it; null for one that
// int64 cannot hold.
pybind11::object array_of_python_number(PyObject* x);

// In place of an array of no dimensions its number, and anything else as it is. Takes and gives a
// reference, or null.
PyObject* number_of(PyObject* result);

// A contiguous copy of a scattered array, of its own kind. May run Python code. Throws
// error_already_set.
pybind11::object packed(PyObject* array, const ArrayKey& key);

// An uninitialised array of the dtype and shape of the key; if that is one of a tensor, of the kind
// of the tensor `x`. May run Python code. Throws error_already_set.
pybind11::object new_array(const ArrayKey& key, PyObject* x);

}  // namespace pycoll
