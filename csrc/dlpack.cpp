#include "dlpack.h"

#include "error.h"

namespace pycoll {
namespace {

struct Device {
  int32_t type;
  int32_t id;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  uint8_t kind;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

template <typename M>
std::shared_ptr<void> own(M* managed) {
  return std::shared_ptr<void>(managed, [](void* p) {
    auto* m = static_cast<M*>(p);
    if (m->deleter != nullptr) m->deleter(m);
  });
}

OpenedTensor describe(const Tensor& tensor, std::shared_ptr<void> owner) {
  COLL_CHECK(tensor.lanes == 1, "ArgumentError", "DLPack elements with ", tensor.lanes,
             " lanes are not supported");
  OpenedTensor out;
  out.kind = tensor.kind;
  out.bits = tensor.bits;
  out.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  out.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  out.strides.resize(tensor.ndim);
  int64_t step = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    out.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : step;
    step *= tensor.shape[i];
  }
  out.owner = std::move(owner);
  return out;
}

}  // namespace

OpenedTensor open_dlpack(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    return describe(managed->tensor, own(managed));
  }
  COLL_CHECK(PyCapsule_IsValid(capsule, "dltensor_versioned"), "ArgumentError",
             "__dlpack__ did not return a fresh DLPack capsule");
  auto* managed =
      static_cast<ManagedVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  PyCapsule_SetName(capsule, "used_dltensor_versioned");
  return describe(managed->tensor, own(managed));
}

}  // namespace pycoll
