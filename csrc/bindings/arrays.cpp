// The part of pycoll._C that makes arrays of other libraries' memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/dlpack.h"

namespace py = pybind11;
namespace pycoll {
namespace {

py::tuple dlpack(const py::object& capsule) {
  OpenedTensor t = open_dlpack(capsule.ptr());
  py::capsule owner(new std::shared_ptr<void>(t.owner),
                    [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  return py::make_tuple(t.kind, t.bits, reinterpret_cast<uintptr_t>(t.data),
                        py::tuple(py::cast(t.shape)), py::tuple(py::cast(t.strides)), owner,
                        t.writable);
}

py::array array_at(uintptr_t pointer, const std::vector<py::ssize_t>& shape,
                   const std::vector<py::ssize_t>& strides, const py::dtype& dtype,
                   const py::object& owner) {
  return py::array(dtype, shape, strides, reinterpret_cast<void*>(pointer), owner);
}

// Address of the first element. (`array.__array_interface__` is ten times slower.)
uintptr_t address(const py::array& array) { return reinterpret_cast<uintptr_t>(array.data()); }

constexpr int kContiguous = 0x0001;  // NPY_ARRAY_C_CONTIGUOUS
constexpr int kWriteable = 0x0400;   // NPY_ARRAY_WRITEABLE

// Address and bytes of a NumPy array that is one stretch of memory, and may be written to if that
// is asked for; None of anything else.
py::object stretch(const py::handle& x, bool written) {
  const auto& api = py::detail::npy_api::get();
  if (Py_TYPE(x.ptr()) != api.PyArray_Type_) return py::none();
  const auto* array = py::detail::array_proxy(x.ptr());
  const int wanted = kContiguous | (written ? kWriteable : 0);
  if ((array->flags & wanted) != wanted) return py::none();
  const auto view = py::reinterpret_borrow<py::array>(x);
  return py::make_tuple(reinterpret_cast<uintptr_t>(array->data), view.nbytes());
}

}  // namespace

void bind_arrays(py::module_& m) {
  using namespace pybind11::literals;
  m.def("open_dlpack", &dlpack, "capsule"_a);
  m.def("address", &address, "array"_a);
  m.def("stretch", &stretch, "x"_a, "written"_a);
  m.def("array_at", &array_at, "pointer"_a, "shape"_a, "strides"_a, "dtype"_a, "owner"_a);
}

}  // namespace pycoll
