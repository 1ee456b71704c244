#include "bindings/calls/dlpack.h"

#include "base/error.h"

namespace py = pybind11;
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

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Exchange {
  Version version;
  void* previous;
  int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*manage)(void*, ManagedVersioned**);
  int (*wrap)(ManagedVersioned*, void**);
  int (*look)(void*, Tensor*);  // may be null
};

constexpr uint32_t kMajor = 1;
constexpr uint64_t kReadOnly = 1, kCopied = 2;  // flags
constexpr char kExchange[] = "dlpack_exchange_api";
constexpr int kCpu = 1, kPageLocked = 3;

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

const Exchange* exchange_of(PyTypeObject* type) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  if (name == nullptr || type->tp_dict == nullptr) return nullptr;
  PyObject* capsule = PyDict_GetItem(type->tp_dict, name);
  if (capsule == nullptr || !PyCapsule_IsValid(capsule, kExchange)) return nullptr;
  const auto* exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, kExchange));
  return exchange->version.major == kMajor ? exchange : nullptr;
}

uint64_t number_from(PyObject* object, PyObject* method) {
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, method));
  const uint64_t number = result ? PyLong_AsUnsignedLongLong(result.ptr()) : 0;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
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
  COLL_CHECK(managed->major == kMajor, "ArgumentError", "DLPack ", managed->major,
             " is not known, only ", kMajor);
  PyCapsule_SetName(capsule, "used_dltensor_versioned");
  OpenedTensor out = describe(managed->tensor, own(managed));
  out.writable = (managed->flags & (kReadOnly | kCopied)) == 0;
  return out;
}

std::optional<SeenTensor> see_tensor(PyObject* object) {
  const Exchange* exchange = exchange_of(Py_TYPE(object));
  if (exchange == nullptr || exchange->look == nullptr) return {};
  Tensor tensor{};
  try {
    if (exchange->look(object, &tensor) != 0) {
      PyErr_Clear();
      return {};
    }
  } catch (...) {  // PyTorch throws, for what is sparse or has no memory
    return {};
  }
  SeenTensor seen;
  seen.on_cpu = tensor.device.type == kCpu || tensor.device.type == kPageLocked;
  seen.kind = tensor.kind;
  seen.bits = tensor.lanes == 1 ? tensor.bits : 0;
  if (tensor.data != nullptr) seen.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  seen.ndim = tensor.ndim;
  seen.shape = tensor.shape;
  seen.strides = tensor.strides;
  return seen;
}

py::object storage_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("untyped_storage");
  auto storage = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, name));
  if (storage) return storage;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  return storage;
}

bool has_memory(PyObject* tensor, uint64_t nbytes, int itemsize) {
  static PyObject* const offset = PyUnicode_InternFromString("storage_offset");
  static PyObject* const size = PyUnicode_InternFromString("nbytes");
  const py::object storage = storage_of(tensor);
  if (!storage) return true;
  const uint64_t before = number_from(tensor, offset) * static_cast<uint64_t>(itemsize);
  return number_from(storage.ptr(), size) >= before + nbytes;
}

}  // namespace pycoll
