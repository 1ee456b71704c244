#include "bindings/calls/object_calls.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "bindings/calls/fast_path.h"
#include "bindings/calls/sized_calls.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr size_t kMostObjectCalls = 64;

// Before the bytes of an object; `_HEAD` in objects.py.
struct Head {
  uint64_t size = 0, root = 0;
};

constexpr Py_ssize_t kHead = sizeof(Head);

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object first_bytes(const py::object& data, const ObjectCall& like) {
  const Py_ssize_t size = PyBytes_GET_SIZE(data.ptr());
  const Head head{static_cast<uint64_t>(size), static_cast<uint64_t>(like.root)};
  py::object first = checked(PyBytes_FromStringAndSize(nullptr, like.room));
  char* const at = PyBytes_AS_STRING(first.ptr());
  const Py_ssize_t end = kHead + std::min(size, like.room - kHead);
  std::memcpy(at, &head, sizeof(head));
  std::memcpy(at + kHead, PyBytes_AS_STRING(data.ptr()), size_t(end - kHead));
  std::memset(at + end, 0, size_t(like.room - end));
  return first;
}

// The bytes of the objects in a table of first bytes; null if it does not have all of them, or if a
// rank has another root.
py::object bodies_in(const py::object& table, const ObjectCall& like) {
  const Py_ssize_t rows = PyBytes_GET_SIZE(table.ptr()) / like.room;
  py::list bodies(rows);
  const char* at = PyBytes_AS_STRING(table.ptr());
  for (Py_ssize_t i = 0; i < rows; ++i, at += like.room) {
    Head head;
    std::memcpy(&head, at, sizeof(head));
    if (head.root != uint64_t(like.root) || head.size > uint64_t(like.room - kHead)) return {};
    bodies[size_t(i)] = checked(PyBytes_FromStringAndSize(at + kHead, Py_ssize_t(head.size)));
  }
  return bodies;
}

py::object unpacked(const ObjectCall& like, const py::object& body, PyObject* pickle,
                    int64_t sender) {
  const py::int_ rank(sender);
  PyObject* const given[] = {body.ptr(), pickle, rank.ptr()};
  return checked(PyObject_Vectorcall(like.unpack.ptr(), given, std::size(given), nullptr));
}

py::object result_of(const ObjectCall& like, const py::list& bodies, PyObject* const* args) {
  if (!like.reads)
    return py::reinterpret_borrow<py::object>(like.rows > 0 ? Py_None : args[kObject]);
  if (like.rows == 0) return unpacked(like, bodies[0], args[kPickle], like.root);
  py::list found(bodies.size());
  for (size_t i = 0; i < bodies.size(); ++i) {
    found[i] = unpacked(like, bodies[i], args[kPickle], int64_t(i));
  }
  return found;
}

std::shared_ptr<const ObjectCall> find(const FastcallState& state, PyObject* const* args) {
  if (!PyLong_CheckExact(args[kObjectRoot])) return nullptr;
  int overflow = 0;
  const int64_t root = PyLong_AsLongLongAndOverflow(args[kObjectRoot], &overflow);
  const auto& all = state.objects;
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& like) {
    return overflow == 0 && like->root == root && like->kind.ptr() == args[kObjectKind];
  });
  return found == all.end() ? nullptr : *found;
}

// What goes to the peers; null where Python code is to tell them that there is nothing.
py::object packed(const ObjectCall& like, PyObject* const* args) {
  if (!like.sends) return py::bytes();
  PyObject* const given[] = {args[kObject], args[kPickle]};
  PyObject* const data = PyObject_Vectorcall(like.pack.ptr(), given, std::size(given), nullptr);
  if (data != nullptr) return py::reinterpret_steal<py::object>(data);
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
  PyErr_Clear();
  return {};
}

py::object run_like_before(FastcallState& state, PyObject* const* args, double limit_s) {
  const std::shared_ptr<const ObjectCall> like = find(state, args);
  const py::object data = like != nullptr ? packed(*like, args) : py::object();
  const uint32_t site = data ? call_site(state) : 0;
  if (!data || !can_run(state)) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  const Py_ssize_t nbytes = std::max<Py_ssize_t>(like->rows, 1) * like->room;
  const py::object table = tell(state, like->call, first_bytes(data, *like), nbytes, site, limit_s);
  if (!table) throw py::error_already_set();
  py::object bodies = bodies_in(table, *like);
  if (!bodies) {
    bodies = like->rest(session_of(state), like->kind, like->root, data, table,
                        py::handle(args[kObjectTimeout]));
  }
  return result_of(*like, bodies, args);
}

}  // namespace

PyObject* call_object(PyObject* fastcall, PyObject* const* args) {
  FastcallState& state = state_of(fastcall);
  const std::optional<double> limit_s = limit_of(args[kObjectTimeout]);
  if (!limit_s || state.objects.empty()) return Py_NewRef(Py_NotImplemented);
  try {
    return run_like_before(state, args, *limit_s).release().ptr();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) tell_of_interrupt(state, error);
    throw;
  }
}

PyObject* remember_object(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 8) throw py::type_error("remember_object takes 8 arguments");
    FastcallState& state = state_of(fastcall);
    auto entry = std::make_shared<ObjectCall>();
    entry->kind = py::reinterpret_borrow<py::object>(args[0]);
    entry->root = py::handle(args[1]).cast<int64_t>();
    if (!can_run(state)) Py_RETURN_NONE;
    entry->call = runnable(state, args[2]);
    entry->room = py::handle(args[3]).cast<Py_ssize_t>();
    entry->rows = py::handle(args[4]).cast<Py_ssize_t>();
    entry->sends = py::handle(args[5]).cast<bool>();
    entry->reads = py::handle(args[6]).cast<bool>();
    const auto functions = py::handle(args[7]).cast<py::tuple>();
    entry->pack = functions[0];
    entry->unpack = functions[1];
    entry->rest = functions[2];
    if (entry->room < kHead)
      throw py::value_error("there is no room for what comes before an object");
    auto& kept = state.objects;
    std::erase_if(kept, [&](const auto& other) {
      return other->root == entry->root && other->kind.is(entry->kind);
    });
    if (kept.size() >= kMostObjectCalls) kept.erase(kept.begin());
    kept.push_back(std::move(entry));
    Py_RETURN_NONE;
  });
}

}  // namespace pycoll
