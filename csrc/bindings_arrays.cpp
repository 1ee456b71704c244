// The part of pycoll._C that makes arrays of other libraries' memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "dlpack.h"
#include "error.h"

namespace py = pybind11;
namespace pycoll {
namespace {

py::tuple dlpack(const py::object& capsule) {
  OpenedTensor t = open_dlpack(capsule.ptr());
  py::capsule owner(new std::shared_ptr<void>(t.owner),
                    [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  return py::make_tuple(t.kind, t.bits, reinterpret_cast<uintptr_t>(t.data),
                        py::tuple(py::cast(t.shape)), py::tuple(py::cast(t.strides)), owner);
}

py::array array_at(uintptr_t pointer, const std::vector<py::ssize_t>& shape,
                   const std::vector<py::ssize_t>& strides, const py::dtype& dtype,
                   const py::object& owner) {
  return py::array(dtype, shape, strides, reinterpret_cast<void*>(pointer), owner);
}

}  // namespace

void bind_arrays(py::module_& m) {
  using namespace pybind11::literals;
  m.def("open_dlpack", &dlpack, "capsule"_a);
  m.def("array_at", &array_at, "pointer"_a, "shape"_a, "strides"_a, "dtype"_a, "owner"_a);
}

}  // namespace pycoll
