// The part of pycoll._C that hands out symmetric memory: as arrays, through NumPy's allocation
// handler (NEP 49), and under arrays that exist already.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/owned_class.h"
#include "memory/heap.h"
#include "memory/pool.h"
#include "memory/registration.h"
#include "memory/reservation.h"

namespace py = pybind11;
namespace pycoll {
namespace {

struct Source {
  std::shared_ptr<Heap> heap;
  Pool& pool;
};

py::array heap_empty(const std::shared_ptr<Heap>& heap, uint32_t region,
                     const std::vector<py::ssize_t>& shape, const py::dtype& dtype, bool zero) {
  uint64_t nbytes = static_cast<uint64_t>(dtype.itemsize());
  for (const py::ssize_t extent : shape) {
    COLL_CHECK(extent == 0 || nbytes <= UINT64_MAX / static_cast<uint64_t>(extent), "MemoryError",
               "an array of this shape does not fit the address space");
    nbytes *= static_cast<uint64_t>(extent);
  }
  struct Block {
    Source source;
    void* data = nullptr;
    ~Block() {
      if (data != nullptr) source.pool.free(data);
    }
  };
  auto block = std::make_unique<Block>(Source{heap, heap->pool(region)});
  bool zeroed = false;
  void* const data = block->data = block->source.pool.alloc(nbytes, &zeroed);
  if (zero && !zeroed) std::memset(data, 0, nbytes);
  const py::capsule owner(block.get(), [](void* p) { delete static_cast<Block*>(p); });
  block.release();
  return py::array(dtype, shape, data, owner);
}

// NumPy's interface for allocators, as numpy/ndarraytypes.h has it.
struct Handler {
  char name[127];
  uint8_t version;
  struct Allocator {
    void* context;
    void* (*malloc)(void*, size_t);
    void* (*calloc)(void*, size_t, size_t);
    void* (*realloc)(void*, void*, size_t);
    void (*free)(void*, void*, size_t);
  } allocator;
};

// Where NumPy's arrays come from: the heap, and ordinary memory for what is smaller than `least`
// bytes and for a child made by fork. With a `least` the heap is no must: what it has no room for
// is ordinary, too. Without one NumPy raises MemoryError.
struct NumpySource {
  Source in;
  uint64_t least;
  const Handler::Allocator& ordinary;
};

void* take(NumpySource& source, uint64_t nbytes, bool* zeroed) {
  if (nbytes < source.least || !source.in.heap->is_owner()) return nullptr;
  try {
    return source.in.pool.alloc(nbytes, zeroed);
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool may_be_ordinary(const NumpySource& source) {
  return source.least > 0 || !source.in.heap->is_owner();
}

void* handler_malloc(void* context, size_t nbytes) {
  auto& source = *static_cast<NumpySource*>(context);
  void* data = take(source, nbytes, nullptr);
  if (data != nullptr || !may_be_ordinary(source)) return data;
  return source.ordinary.malloc(source.ordinary.context, nbytes);
}

void* handler_calloc(void* context, size_t count, size_t nbytes) {
  auto& source = *static_cast<NumpySource*>(context);
  bool zeroed = false;
  void* data = take(source, count * nbytes, &zeroed);
  if (data != nullptr) return zeroed ? data : std::memset(data, 0, count * nbytes);
  if (!may_be_ordinary(source)) return nullptr;
  return source.ordinary.calloc(source.ordinary.context, count, nbytes);
}

void handler_free(void* context, void* data, size_t nbytes) {
  auto& source = *static_cast<NumpySource*>(context);
  if (!source.in.heap->contains(data, 1))
    return source.ordinary.free(source.ordinary.context, data, nbytes);
  source.in.pool.free(data);
}

void* handler_realloc(void* context, void* data, size_t nbytes) {
  auto& source = *static_cast<NumpySource*>(context);
  if (data == nullptr) return handler_malloc(context, nbytes);
  if (!source.in.heap->contains(data, 1))
    return source.ordinary.realloc(source.ordinary.context, data, nbytes);
  const uint64_t had = source.in.pool.size_of(data);
  if (nbytes <= had && nbytes >= had / 2) return data;
  void* fresh = handler_malloc(context, nbytes);
  if (fresh == nullptr) return nullptr;
  std::memcpy(fresh, data, std::min<uint64_t>(had, nbytes));
  handler_free(context, data, had);
  return fresh;
}

// NumPy's table of functions.
void** numpy_api() {
  static void** const table = [] {
    const char* where = "numpy._core._multiarray_umath";
    try {
      return static_cast<void**>(py::capsule(py::module_::import(where).attr("_ARRAY_API")));
    } catch (py::error_already_set&) {
      where = "numpy.core._multiarray_umath";
      return static_cast<void**>(py::capsule(py::module_::import(where).attr("_ARRAY_API")));
    }
  }();
  return table;
}

constexpr char kHandlerName[] = "mem_handler";

// What PyDataMem_SetHandler takes. The arrays made with it keep it, and so the heap, alive.
py::capsule make_handler(const std::shared_ptr<Heap>& heap, uint32_t region, uint64_t least) {
  constexpr int kDefaultHandler = 306;  // its place in NumPy's table, the same since 1.22
  auto* const own = *static_cast<PyObject**>(numpy_api()[kDefaultHandler]);
  const auto* ordinary = static_cast<const Handler*>(PyCapsule_GetPointer(own, kHandlerName));
  if (ordinary == nullptr) throw py::error_already_set();
  auto source = std::make_unique<NumpySource>(
      NumpySource{{heap, heap->pool(region)}, least, ordinary->allocator});
  auto handler = std::make_unique<Handler>(Handler{
      "pycoll",
      1,
      {source.get(), handler_malloc, handler_calloc, handler_realloc, handler_free},
  });
  py::capsule made(handler.get(), kHandlerName, [](PyObject* capsule) {
    auto* h = static_cast<Handler*>(PyCapsule_GetPointer(capsule, kHandlerName));
    delete static_cast<NumpySource*>(h->allocator.context);
    delete h;
  });
  source.release();
  handler.release();
  return made;
}

// Makes NumPy allocate through a handler in this context, and returns the one before.
py::object set_handler(const py::object& handler) {
  constexpr int kSetHandler = 304;
  using SetHandler = PyObject* (*)(PyObject*);
  PyObject* before = reinterpret_cast<SetHandler>(numpy_api()[kSetHandler])(handler.ptr());
  if (before == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(before);
}

// Makes an object the base of an array, also of one that owns its memory: the array holds it, and
// lets go of it before it frees that memory. NumPy's own function does so once only.
void set_base(const py::array& array, const py::object& base) {
  PyObject* const given = base.is_none() ? nullptr : base.ptr();
  Py_XINCREF(given);
  Py_XDECREF(std::exchange(py::detail::array_proxy(array.ptr())->base, given));
}

}  // namespace

void bind_memory(py::module_& m) {
  using namespace pybind11::literals;
  m.def("set_numpy_handler", &set_handler, "handler"_a);
  m.def("set_base", &set_base, "array"_a, "base"_a);
  m.def("available_memory", &available_memory, "root"_a = "");
  OwnedClass<Heap>(m, "Heap")
      .def(made<Heap, int, uint32_t, uint64_t>(), "fd"_a, "regions"_a, "region_bytes"_a)
      .def("contains", [](const Heap& h, uintptr_t p,
                          uint64_t nbytes) { return h.contains(pointer(p), nbytes); })
      .def("is_aliased", [](const Heap& h, uintptr_t p,
                            uint64_t nbytes) { return h.is_aliased(pointer(p), nbytes); })
      .def("alias_below", &Heap::alias_below)
      .def("empty", &heap_empty, "region"_a, "shape"_a, "dtype"_a, "zero"_a = false)
      .def("numpy_handler", &make_handler, "region"_a, "least"_a = 0)
      .def("usage", [](Heap& h, uint32_t region) {
        return py::make_tuple(h.pool(region).used_bytes(), h.pool(region).kept_bytes());
      });
  OwnedClass<Registration>(m, "Registration")
      .def(made<Registration, std::shared_ptr<Heap>>(), "heap"_a)
      .def("move_in", [](Registration& r, uint32_t region, uintptr_t data,
                         uint64_t nbytes) { r.move_in(region, pointer<char>(data), nbytes); })
      .def(
          "watch",
          [](Registration& r, const py::object& address) {
            r.watch([address, here = address().cast<uintptr_t>()] {
              try {
                return address().cast<uintptr_t>() == here;
              } catch (py::error_already_set&) {  // it has no memory
                return false;
              }
            });
          },
          "address"_a)
      .def_property_readonly("is_in", &Registration::is_in)
      .def_property_readonly("is_there", &Registration::is_there)
      .def_property_readonly("is_held", &Registration::is_held)
      .def("release", &Registration::release)
      .def("release_unheld", &Registration::release_unheld)
      .def("forget", &Registration::forget)
      .def("gather", [](const Registration& r, uintptr_t data,
                        uint64_t nbytes) { r.gather(pointer<char>(data), nbytes); })
      .def("scatter", [](const Registration& r, uintptr_t data,
                         uint64_t nbytes) { r.scatter(pointer<char>(data), nbytes); })
      .def("edges",
           [](const Registration& r, uintptr_t data, uint64_t nbytes) {
             std::vector<std::tuple<uintptr_t, uintptr_t, uint64_t>> found;
             r.edges(pointer<char>(data), nbytes, [&](char* user, char* heap, size_t n) {
               found.emplace_back(reinterpret_cast<uintptr_t>(user),
                                  reinterpret_cast<uintptr_t>(heap), n);
             });
             return found;
           })
      .def_property_readonly("heap_address", [](const Registration& r) {
        return reinterpret_cast<uintptr_t>(r.heap_address());
      });
  OwnedClass<Hold>(m, "Hold")
      .def(made<Hold, std::shared_ptr<Registration>>(), "held"_a)
      .def("end", &Hold::end);
  using Copies = std::vector<std::tuple<uintptr_t, uintptr_t, uint64_t>>;  // to, from, bytes
  OwnedClass<Detours>(m, "Detours")
      .def(py::init([](const Copies& before, const Copies& after) {
             auto detours = std::make_shared<Detours>();
             const auto add = [](std::vector<Detours::Copy>& to, const Copies& copies) {
               for (const auto& [dst, src, nbytes] : copies) {
                 to.push_back({pointer(dst), pointer(src), nbytes});
               }
             };
             add(detours->before, before);
             add(detours->after, after);
             return detours;
           }),
           "before"_a, "after"_a);
}

}  // namespace pycoll
