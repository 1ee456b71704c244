// Opens DLPack capsules: memory of other array libraries, without importing them.
// Layout of the structures: DLPack 1.x, dlpack.h.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace pycoll {

struct OpenedTensor {
  int kind = 0;  // DLPack type code: 0 int, 1 uint, 2 float, 4 bfloat16, 5 complex, 6 bool
  int bits = 0;
  void* data = nullptr;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  std::shared_ptr<void> owner;   // keeps the memory alive
};

// Takes the tensor out of a capsule named "dltensor" or "dltensor_versioned" and marks the capsule
// as used. Throws ArgumentError for anything else, for vectorised element types and for capsules
// already used.
OpenedTensor open_dlpack(PyObject* capsule);

}  // namespace pycoll
