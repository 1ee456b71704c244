#include "bindings/p2p/plain_message.h"

#include <pybind11/numpy.h>

#include "bindings/calls/arguments.h"
#include "bindings/calls/dlpack.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr int64_t kTags = int64_t{1} << 31;

// From 0 to below `end`.
std::optional<int64_t> plain_number(PyObject* x, int64_t end, bool or_any = false) {
  if (!PyLong_Check(x) || PyBool_Check(x)) return std::nullopt;
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(x, &overflow);
  if (overflow != 0 || number >= end) return std::nullopt;
  if (or_any && number == kAny) return -1;
  return number < 0 ? std::nullopt : std::optional(number);
}

// The memory of an array or a tensor, and what its type is known by.
struct PlainMemory {
  char* data;
  uint64_t nbytes;
  py::object type;
};

std::optional<PlainMemory> plain_memory(PyObject* x, bool written) {
  if (const auto memory = stretch(x, written)) {
    const auto type = reinterpret_cast<PyObject*>(py::detail::array_proxy(x)->descr);
    return PlainMemory{reinterpret_cast<char*>(memory->first), memory->second,
                       py::reinterpret_borrow<py::object>(type)};
  }
  ArrayKey key;
  ArrayMemory memory;
  if (x == Py_None) return std::nullopt;
  const bool plain = describe_array(nullptr, x, written, key, memory) && !memory.scattered;
  if (!plain || key.element == 0) return std::nullopt;
  return PlainMemory{memory.data, memory.nbytes, py::int_(key.element)};
}

}  // namespace

std::optional<int64_t> plain_rank(PyObject* x, uint32_t ranks) { return plain_number(x, ranks); }

std::optional<int64_t> plain_tag(PyObject* x) { return plain_number(x, kTags); }

std::optional<int64_t> plain_rank_or_any(PyObject* x, uint32_t ranks) {
  return plain_number(x, ranks, true);
}

std::optional<int64_t> plain_tag_or_any(PyObject* x) { return plain_number(x, kTags, true); }

std::optional<PlainMessage> plain_message(const py::dict& types, PyObject* x, bool incoming,
                                          PyObject* peer, uint32_t ranks, PyObject* tag) {
  const auto rank = incoming ? plain_rank_or_any(peer, ranks) : plain_rank(peer, ranks);
  const auto label = plain_tag(tag);
  const auto memory = rank && label ? plain_memory(x, incoming) : std::nullopt;
  if (!memory) return std::nullopt;
  PyObject* const number = PyDict_GetItemWithError(types.ptr(), memory->type.ptr());
  if (number == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (number == nullptr) return std::nullopt;
  return PlainMessage{memory->data, memory->nbytes,
                      static_cast<uint32_t>(PyLong_AsUnsignedLong(number)),
                      static_cast<int32_t>(*rank), static_cast<uint32_t>(*label)};
}

py::object holder_of(PyObject* x) {
  py::object storage = stretch(x, false) ? py::object() : storage_of(x);
  return storage ? storage : py::reinterpret_borrow<py::object>(x);
}

py::object array_of(PyObject* x, const PlainMessage& m) {
  if (stretch(x, false)) return py::reinterpret_borrow<py::object>(x);
  return py::array(py::dtype::of<uint8_t>(), {py::ssize_t(m.nbytes)}, m.data, py::handle(x));
}

}  // namespace pycoll
