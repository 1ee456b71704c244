// The part of pycoll._C that makes arrays: of the symmetric heap, and of other libraries' memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "dlpack.h"
#include "error.h"
#include "heap.h"

namespace py = pybind11;
namespace pycoll {
namespace {

py::array heap_empty(const std::shared_ptr<Heap>& heap, uint32_t region,
                     const std::vector<py::ssize_t>& shape, const py::dtype& dtype) {
  uint64_t nbytes = static_cast<uint64_t>(dtype.itemsize());
  for (const py::ssize_t extent : shape) {
    COLL_CHECK(extent == 0 || nbytes <= UINT64_MAX / static_cast<uint64_t>(extent), "MemoryError",
               "an array of this shape does not fit the address space");
    nbytes *= static_cast<uint64_t>(extent);
  }
  struct Block {
    std::shared_ptr<Heap> heap;
    uint64_t offset;
  };
  auto* block = new Block{heap, heap->alloc(region, nbytes)};
  py::capsule owner(block, [](void* p) {
    auto* b = static_cast<Block*>(p);
    b->heap->free(b->offset);
    delete b;
  });
  return py::array(dtype, shape, heap->at(block->offset), owner);
}

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
  py::class_<Heap, std::shared_ptr<Heap>>(m, "Heap")
      .def(py::init<int, uint32_t, uint64_t>(), "fd"_a, "regions"_a, "region_bytes"_a)
      .def("contains",
           [](const Heap& h, uintptr_t p, uint64_t nbytes) {
             return h.contains(reinterpret_cast<void*>(p), nbytes);
           })
      .def("empty", &heap_empty, "region"_a, "shape"_a, "dtype"_a);
}

}  // namespace pycoll
