#include "bindings/calls/arguments.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <complex>
#include <cstring>

#include "bindings/bindings.h"
#include "bindings/calls/dlpack.h"
#include "memory/registration.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr int kContiguous = 0x0001;  // NPY_ARRAY_C_CONTIGUOUS
constexpr int kWriteable = 0x0400;   // NPY_ARRAY_WRITEABLE
constexpr int kRowMajor = 0;         // NPY_CORDER
constexpr int kComplex = 5;          // of DLPack

// The first byte of an array, and how many there are up to its last.
struct Span {
  const char* first;
  uint64_t nbytes;
};

template <typename Int>
Span span_of(const char* data, int ndim, const Int* dims, const Int* strides, Py_ssize_t unit,
             Py_ssize_t itemsize) {
  Py_ssize_t low = 0, high = itemsize;
  for (int i = 0; i < ndim; ++i) {
    const Py_ssize_t reach = (dims[i] - 1) * strides[i] * unit;
    (reach < 0 ? low : high) += reach;
  }
  return {data + low, static_cast<uint64_t>(high - low)};
}

template <typename Int>
bool lies_in_rows(int ndim, const Int* dims, const Int* strides) {
  Int step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (dims[i] != 1 && strides[i] != step) return false;
    step *= dims[i];
  }
  return true;
}

// Whether all of some memory is registered, and still lies where it was then.
[[gnu::noinline]] bool is_registered(const Heap* heap, const Span& span) {
  const auto whole = heap->registration_of(span.first, span.nbytes);
  return whole != nullptr && whole->is_there();
}

// Sets the place of an array; false if only a part of it is registered, or if it is scattered over
// what peers reach.
[[gnu::always_inline]] inline bool set_place(const Heap* heap, const Span& span, ArrayKey& key,
                                             const ArrayMemory& memory) {
  const bool symmetric = heap != nullptr && heap->contains(span.first, span.nbytes);
  key.place = symmetric ? Place::kSymmetric : Place::kPrivate;
  if (symmetric) return !memory.scattered;
  if (heap == nullptr || !heap->is_aliased(span.first, span.nbytes)) return true;
  key.place = Place::kRegistered;
  return !memory.scattered && is_registered(heap, span);
}

template <typename Int>
void set_shape(int ndim, const Int* dims, Py_ssize_t itemsize, ArrayKey& key, ArrayMemory& memory) {
  key.ndim = ndim;
  memory.nbytes = static_cast<uint64_t>(itemsize);
  for (int i = 0; i < ndim; ++i) {
    key.dims[i] = dims[i];
    memory.nbytes *= static_cast<uint64_t>(dims[i]);
  }
}

bool describe_numpy(const Heap* heap, PyObject* object, bool written, ArrayKey& key,
                    ArrayMemory& memory) {
  const auto* array = py::detail::array_proxy(object);
  memory.scattered = (array->flags & kContiguous) == 0;
  if (written && (memory.scattered || (array->flags & kWriteable) == 0)) return false;
  if (array->nd > ArrayKey::kMaxDims) return false;
  key.type = array->descr;
  const auto itemsize = py::reinterpret_borrow<py::dtype>(array->descr).itemsize();
  set_shape(array->nd, array->dimensions, itemsize, key, memory);
  memory.data = array->data;
  Span span{array->data, memory.nbytes};
  if (memory.scattered) {
    span = span_of(array->data, array->nd, array->dimensions, array->strides, 1, itemsize);
  }
  return set_place(heap, span, key, memory);
}

bool is_true(PyObject* found) {
  if (found == nullptr) PyErr_Clear();  // other libraries have no such thing
  Py_XDECREF(found);
  return found == Py_True;
}

// Whether this is a NumPy array of a subclass that is nothing but its elements.
bool is_subclass(PyObject* object) {
  if (PyObject_TypeCheck(object, py::detail::npy_api::get().PyArray_Type_) == 0) return false;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  static PyObject* const masked = PyUnicode_InternFromString("_defaulthardmask");
  static PyObject* const new_empty = PyUnicode_InternFromString("new_empty");
  return PyObject_HasAttr(type, masked) == 0 && PyObject_HasAttr(type, new_empty) == 0;
}

// Whether the memory of a tensor is not what the tensor means, or may not be touched. What is
// exported by its library in the usual way is refused for that.
bool is_special(PyObject* tensor) {
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  return is_true(PyObject_GetAttr(tensor, requires_grad)) ||
         is_true(PyObject_CallMethodNoArgs(tensor, is_neg));
}

bool describe_tensor(const Heap* heap, PyObject* object, bool written, ArrayKey& key,
                     ArrayMemory& memory) {
  const auto seen = see_tensor(object);
  if (!seen || !seen->on_cpu || seen->data == nullptr || seen->ndim > ArrayKey::kMaxDims ||
      seen->kind == kComplex || seen->bits % 8 != 0 || seen->bits == 0 || is_special(object)) {
    return false;
  }
  const int itemsize = seen->bits / 8;
  key.type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  key.element = static_cast<uint32_t>(seen->kind) << 8 | static_cast<uint32_t>(seen->bits);
  set_shape(seen->ndim, seen->shape, itemsize, key, memory);
  memory.data = seen->data;
  memory.scattered =
      seen->strides != nullptr && !lies_in_rows(seen->ndim, seen->shape, seen->strides);
  if (memory.nbytes == 0 || (written && memory.scattered)) return false;
  Span span{seen->data, memory.nbytes};
  if (memory.scattered) {
    span = span_of(seen->data, seen->ndim, seen->shape, seen->strides, itemsize, itemsize);
  }
  return has_memory(object, span.nbytes, itemsize) && set_place(heap, span, key, memory);
}

py::tuple dlpack(const py::object& capsule) {
  OpenedTensor t = open_dlpack(capsule.ptr());
  py::capsule owner(new std::shared_ptr<void>(t.owner),
                    [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  return py::make_tuple(t.kind, t.bits, reinterpret_cast<uintptr_t>(t.data),
                        py::tuple(py::cast(t.shape)), py::tuple(py::cast(t.strides)), owner,
                        t.writable);
}

// What ArrayKey has for the elements of a tensor; 0 of anything else.
uint32_t element_of(PyObject* object) {
  ArrayKey key;
  ArrayMemory memory;
  if (Py_TYPE(object) == py::detail::npy_api::get().PyArray_Type_) return 0;
  return describe_array(nullptr, object, false, key, memory) ? key.element : 0;
}

py::array array_at(uintptr_t pointer, const std::vector<py::ssize_t>& shape,
                   const std::vector<py::ssize_t>& strides, const py::dtype& dtype,
                   const py::object& owner) {
  return py::array(dtype, shape, strides, reinterpret_cast<void*>(pointer), owner);
}

// Address of the first element. (`array.__array_interface__` is ten times slower.)
uintptr_t address(const py::array& array) { return reinterpret_cast<uintptr_t>(array.data()); }

template <typename T>
py::object array_of(T value) {
  return py::array(py::dtype::of<T>(), py::array::ShapeContainer(), &value);
}

}  // namespace

bool is_python_number(PyObject* x) {
  return PyFloat_CheckExact(x) || PyLong_CheckExact(x) || PyBool_Check(x) ||
         PyComplex_CheckExact(x);
}

py::object array_of_python_number(PyObject* x) {
  if (PyFloat_CheckExact(x)) return array_of(PyFloat_AS_DOUBLE(x));
  if (PyBool_Check(x)) return array_of(x == Py_True);
  if (PyComplex_CheckExact(x)) {
    const Py_complex z = PyComplex_AsCComplex(x);
    return array_of(std::complex(z.real, z.imag));
  }
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(x, &overflow);
  return overflow == 0 ? array_of(number) : py::object();
}

PyObject* number_of(PyObject* result) {
  if (result == nullptr || Py_TYPE(result) != py::detail::npy_api::get().PyArray_Type_ ||
      py::detail::array_proxy(result)->nd != 0) {
    return result;
  }
  const auto array = py::reinterpret_steal<py::object>(result);
  return PyObject_GetItem(result, py::tuple().ptr());
}

std::optional<std::pair<uintptr_t, uint64_t>> stretch(const py::handle& x, bool written) {
  const auto& api = py::detail::npy_api::get();
  if (Py_TYPE(x.ptr()) != api.PyArray_Type_) return std::nullopt;
  const auto* array = py::detail::array_proxy(x.ptr());
  const int wanted = kContiguous | (written ? kWriteable : 0);
  if ((array->flags & wanted) != wanted) return std::nullopt;
  const auto view = py::reinterpret_borrow<py::array>(x);
  return std::pair{reinterpret_cast<uintptr_t>(array->data), static_cast<uint64_t>(view.nbytes())};
}

std::optional<double> limit_of(PyObject* timeout) {
  if (timeout == Py_None) return Engine::kDefaultTimeout;
  double seconds = 0;
  if (PyFloat_CheckExact(timeout)) seconds = PyFloat_AS_DOUBLE(timeout);
  if (PyLong_CheckExact(timeout)) seconds = PyLong_AsDouble(timeout);
  if (PyErr_Occurred() != nullptr) PyErr_Clear();  // the number has too many digits
  return seconds > 0 ? std::optional(seconds) : std::nullopt;
}

bool describe_array(const Heap* heap, PyObject* object, bool written, ArrayKey& key,
                    ArrayMemory& memory) {
  if (object == Py_None) return true;
  const auto& api = py::detail::npy_api::get();  // no static: it imports, and may pass the GIL on
  return Py_TYPE(object) == api.PyArray_Type_ || is_subclass(object)
             ? describe_numpy(heap, object, written, key, memory)
             : describe_tensor(heap, object, written, key, memory);
}

bool is_buffer(PyObject* x) {
  return PyByteArray_CheckExact(x) || PyBytes_CheckExact(x) || PyMemoryView_Check(x) ||
         std::strcmp(Py_TYPE(x)->tp_name, "array.array") == 0;
}

py::object packed(PyObject* array, const ArrayKey& key) {
  PyObject* copy = key.element == 0 ? py::detail::npy_api::get().PyArray_NewCopy_(array, kRowMajor)
                                    : PyObject_CallMethod(array, "contiguous", nullptr);
  if (copy == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(copy);
}

py::object new_array(const ArrayKey& key, PyObject* x) {
  if (key.element != 0) {
    py::tuple shape(key.ndim);
    for (int i = 0; i < key.ndim; ++i) shape[i] = py::int_(key.dims[i]);
    return py::handle(x).attr("new_empty")(shape);
  }
  const py::array::ShapeContainer shape(key.dims.begin(), key.dims.begin() + key.ndim);
  return py::array(py::reinterpret_borrow<py::dtype>(key.type), shape);
}

// The part of pycoll._C that makes arrays of other libraries' memory.
void bind_arrays(py::module_& m) {
  using namespace pybind11::literals;
  m.def("open_dlpack", &dlpack, "capsule"_a);
  m.def("address", &address, "array"_a);
  m.def("element", [](py::handle x) { return element_of(x.ptr()); }, "x"_a);
  m.def("stretch", &stretch, "x"_a, "written"_a);
  m.def("array_at", &array_at, "pointer"_a, "shape"_a, "strides"_a, "dtype"_a, "owner"_a);
}

}  // namespace pycoll
