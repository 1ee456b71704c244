#include "bindings/calls/object_calls.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "bindings/calls/fast_path.h"
#include "bindings/calls/sized_calls.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr size_t kMostObjectCalls = 64;

// Before the bytes of an object; `_HEAD` in objects.py.
struct Head {
  uint64_t size = 0, largest = 0, root = 0;  // the largest object of the sender's
};

constexpr Py_ssize_t kHead = sizeof(Head);

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

void add_packed(const ObjectCall& like, PyObject* object, PyObject* pickle, py::list& packed) {
  PyObject* const given[] = {object, pickle};
  packed.append(checked(PyObject_Vectorcall(like.pack.ptr(), given, std::size(given), nullptr)));
}

// Whether the caller gives what this call sends; if not, Python code is to say what is wrong.
bool fits(const ObjectCall& like, PyObject* x) {
  if (!like.sends || like.given == 0) return true;
  const bool listed = PyList_CheckExact(x) || PyTuple_CheckExact(x);
  return listed && PySequence_Fast_GET_SIZE(x) == like.given;
}

// What goes to the peers, as bytes.
py::list packed_of(const ObjectCall& like, PyObject* const* args) {
  py::list packed;
  if (!like.sends) return packed;
  if (like.given == 0) {
    add_packed(like, args[kObject], args[kPickle], packed);
    return packed;
  }
  const py::tuple objects = checked(PySequence_Tuple(args[kObject]));  // packing may change a list
  for (const py::handle object : objects) add_packed(like, object.ptr(), args[kPickle], packed);
  return packed;
}

// The first bytes of all objects that are given, or as many zeros.
py::object first_bytes(const ObjectCall& like, const py::list& packed) {
  const Py_ssize_t rows = std::max<Py_ssize_t>(like.given, 1);
  py::object first = checked(PyBytes_FromStringAndSize(nullptr, rows * like.room));
  char* at = PyBytes_AS_STRING(first.ptr());
  std::memset(at, 0, size_t(rows * like.room));
  Head head{.root = uint64_t(like.root)};
  for (const py::handle data : packed) {
    head.largest = std::max(head.largest, uint64_t(PyBytes_GET_SIZE(data.ptr())));
  }
  for (const py::handle data : packed) {
    head.size = uint64_t(PyBytes_GET_SIZE(data.ptr()));
    std::memcpy(at, &head, sizeof(head));
    const size_t shown = std::min(head.size, uint64_t(like.room - kHead));
    std::memcpy(at + kHead, PyBytes_AS_STRING(data.ptr()), shown);
    at += like.room;
  }
  return first;
}

// The bytes of the objects that have come; null if these are not all of them, or if a rank has
// another root.
py::object bodies_in(const ObjectCall& like, const py::object& came) {
  const char* const end = PyBytes_AS_STRING(came.ptr()) + PyBytes_GET_SIZE(came.ptr());
  const auto each = [&](const auto& use) {
    for (const char* at = PyBytes_AS_STRING(came.ptr()); at < end; at += like.room) {
      Head head;
      std::memcpy(&head, at, sizeof(head));
      use(head, at + kHead);
    }
  };
  bool whole = true;
  each([&](const Head& head, const char*) {
    whole = whole && std::max(head.size, head.largest) <= uint64_t(like.room - kHead) &&
            head.root == uint64_t(like.root);
  });
  if (!whole) return {};
  py::list bodies;
  each([&](const Head& head, const char* body) {
    bodies.append(checked(PyBytes_FromStringAndSize(body, Py_ssize_t(head.size))));
  });
  return bodies;
}

py::object unpacked(const ObjectCall& like, const py::object& body, PyObject* pickle,
                    int64_t sender) {
  const py::int_ rank(sender);
  PyObject* const given[] = {body.ptr(), pickle, rank.ptr()};
  return checked(PyObject_Vectorcall(like.unpack.ptr(), given, std::size(given), nullptr));
}

py::object objects_of(const ObjectCall& like, const py::list& bodies, PyObject* const* args) {
  if (like.came == 0) return unpacked(like, bodies[0], args[kPickle], like.root);
  py::list found;  // nothing in it is ever null: what is read may look at all lists there are
  for (size_t i = 0; i < bodies.size(); ++i) {
    found.append(unpacked(like, bodies[i], args[kPickle], int64_t(i)));
  }
  return found;
}

// What a rank gets that reads nothing: None, or its own object.
py::object own_of(const ObjectCall& like, PyObject* x) {
  if (like.reads || like.came > 0) return py::none();
  return py::reinterpret_borrow<py::object>(
      like.given > 0 ? PySequence_Fast_GET_ITEM(x, Py_ssize_t(like.root)) : x);
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

py::object run_like_before(FastcallState& state, PyObject* const* args, double limit_s) {
  const std::shared_ptr<const ObjectCall> like = find(state, args);
  const auto not_served = py::reinterpret_borrow<py::object>(Py_NotImplemented);
  if (like == nullptr || !fits(*like, args[kObject])) return not_served;
  const py::object own = own_of(*like, args[kObject]);
  const auto [packed, first, site] = refusing(state, [&] {
    const py::list all = packed_of(*like, args);
    return std::tuple(all, first_bytes(*like, all), call_site(state));
  });
  if (!can_run(state)) return not_served;
  const Py_ssize_t nbytes = std::max<Py_ssize_t>(like->came, 1) * like->room;
  const py::object came = tell(state, like->call, first, nbytes, site, limit_s);
  if (!came) throw py::error_already_set();
  py::object bodies = bodies_in(*like, came);
  if (!bodies) {
    bodies = like->rest(session_of(state), like->kind, like->root, packed, came,
                        py::handle(args[kObjectTimeout]));
  }
  return like->reads ? objects_of(*like, bodies, args) : own;
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
    if (nargs != 9) throw py::type_error("remember_object takes 9 arguments");
    const auto given = [&](int i) { return py::reinterpret_borrow<py::object>(args[i]); };
    const auto functions = given(8).cast<py::tuple>();
    FastcallState& state = state_of(fastcall);
    if (!can_run(state)) Py_RETURN_NONE;
    const ObjectCall entry{runnable(state, args[2]),
                           given(3).cast<Py_ssize_t>(),
                           given(4).cast<Py_ssize_t>(),
                           given(5).cast<Py_ssize_t>(),
                           given(1).cast<int64_t>(),
                           given(6).cast<bool>(),
                           given(7).cast<bool>(),
                           given(0),
                           functions[0],
                           functions[1],
                           functions[2]};
    if (entry.room < kHead) throw py::value_error("there is no room for a head");
    auto& kept = state.objects;
    std::erase_if(kept, [&](const auto& other) {
      return other->root == entry.root && other->kind.is(entry.kind);
    });
    if (kept.size() >= kMostObjectCalls) kept.erase(kept.begin());
    kept.push_back(std::make_shared<const ObjectCall>(entry));
    Py_RETURN_NONE;
  });
}

}  // namespace pycoll
