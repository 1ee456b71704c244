// The part of pycoll._C that changes elements which other processes may change at the same time.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

#include "bindings/bindings.h"

namespace py = pybind11;
namespace pycoll {
namespace {

// Where an element of each of three arrays of one shape lies.
struct Elements {
  char* target;
  const char* given;
  char* old;
};

// Calls f with each element of `target`, and those in its place in the others.
template <typename T, typename F>
void for_each(const py::array (&arrays)[3], const F& f, Elements at, py::ssize_t dim = 0) {
  const auto& [target, given, old] = arrays;
  if (dim == target.ndim()) {
    f(std::atomic_ref<T>(*reinterpret_cast<T*>(at.target)), *reinterpret_cast<const T*>(at.given),
      *reinterpret_cast<T*>(at.old));
    return;
  }
  for (py::ssize_t i = 0; i < target.shape(dim); ++i) {
    for_each<T>(arrays, f,
                {at.target + i * target.strides(dim), at.given + i * given.strides(dim),
                 at.old + i * old.strides(dim)},
                dim + 1);
  }
}

template <typename F>
void change(const py::array& target, const py::array& given, const py::array& old, const F& f) {
  py::array arrays[] = {target, given, old};
  const Elements first{static_cast<char*>(arrays[0].mutable_data()),
                       static_cast<const char*>(arrays[1].data()),
                       static_cast<char*>(arrays[2].mutable_data())};
  const bool wide = target.itemsize() == 8;
  switch (target.dtype().kind()) {
    case 'i':
      return wide ? for_each<int64_t>(arrays, f, first) : for_each<int32_t>(arrays, f, first);
    case 'u':
      return wide ? for_each<uint64_t>(arrays, f, first) : for_each<uint32_t>(arrays, f, first);
    default:
      return wide ? for_each<double>(arrays, f, first) : for_each<float>(arrays, f, first);
  }
}

void add(const py::array& target, const py::array& given, const py::array& old) {
  change(target, given, old,
         [](auto element, auto value, auto& before) { before = element.fetch_add(value); });
}

void replace(const py::array& target, const py::array& given, const py::array& old) {
  change(target, given, old, [](auto element, auto value, auto& before) {
    element.compare_exchange_strong(before, value);
  });
}

}  // namespace

void bind_atomics(py::module_& m) {
  using namespace pybind11::literals;
  m.def("atomic_add", &add, "target"_a, "given"_a, "old"_a,
        "Adds to each element, and stores what it was. All three: aligned, of one shape and dtype, "
        "integers or floats of 4 or 8 bytes.");
  m.def("atomic_replace", &replace, "target"_a, "given"_a, "old"_a,
        "Likewise replaces each element that is what `old` has there.");
}

}  // namespace pycoll
