// Opens DLPack capsules, and looks at tensors through DLPack's C exchange API: memory of other
// array libraries, without importing them. Layout of the structures: DLPack 1.x, dlpack.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace pycoll {

struct OpenedTensor {
  int kind = 0;  // DLPack type code: 0 int, 1 uint, 2 float, 4 bfloat16, 5 complex, 6 bool,
                 // 10 float8_e4m3fn, 12 float8_e5m2
  int bits = 0;
  void* data = nullptr;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  std::shared_ptr<void> owner;   // keeps the memory alive
  bool writable = true;          // as far as the capsule tells
};

// Takes the tensor out of a capsule named "dltensor" or "dltensor_versioned" and marks the capsule
// as used. Throws ArgumentError for anything else, for vectorised element types and for capsules
// already used.
OpenedTensor open_dlpack(PyObject* capsule);

// A tensor in memory as long as nobody changes the tensor; it is not kept alive.
struct SeenTensor {
  bool on_cpu = false;
  int kind = 0, bits = 0;  // as of OpenedTensor; 0 bits for vectorised elements
  char* data = nullptr;
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements; null where contiguous
};

// Looks at a tensor whose type, not one that this is made from, has DLPack's C exchange API.
// Nothing if it is no such tensor, or its library cannot show it.
std::optional<SeenTensor> see_tensor(PyObject* object);

// The storage of a tensor of PyTorch, which keeps its memory where it is, also when the tensor lets
// go of it; null for those of other libraries. Throws what Python raises.
pybind11::object storage_of(PyObject* tensor);

// Whether the storage of a tensor of PyTorch reaches as far as its elements do, `nbytes` from the
// first of them: it may have been shrunk, which its address does not tell. Other libraries have no
// such thing. Throws what Python raises.
bool has_memory(PyObject* tensor, uint64_t nbytes, int itemsize);

}  // namespace pycoll
