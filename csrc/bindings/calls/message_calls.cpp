#include "bindings/calls/message_calls.h"

#include <pybind11/numpy.h>

#include <new>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/calls/arguments.h"
#include "bindings/calls/fast_path.h"
#include "bindings/calls/registered_calls.h"
#include "bindings/calls/remembered_calls.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr int64_t kTags = int64_t{1} << 31;

// A message as it usually is: a plain array or tensor of a known type, and numbers in range.
struct PlainMessage {
  char* data;
  uint64_t nbytes;
  uint32_t type;
  int32_t peer;  // -1: any
  uint32_t tag;
};

// A Python int from `lowest` to below `end`; nothing for anything else, also for a bool.
std::optional<int64_t> plain_number(PyObject* x, int64_t lowest, int64_t end) {
  if (!PyLong_CheckExact(x)) return std::nullopt;
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(x, &overflow);
  if (overflow != 0 || number < lowest || number >= end) return std::nullopt;
  return number;
}

// A rank to receive from, -1 for any; nothing for anything else.
std::optional<int64_t> plain_source(PyObject* x, uint32_t ranks) {
  const auto rank = plain_number(x, kAny, ranks);
  if (rank == kAny) return -1;
  return rank && *rank >= 0 ? rank : std::nullopt;
}

// The memory of a plain array, and what its type is known by in MessagePath::types; or of a tensor,
// which only a call may use that ends before it returns: the tensor may let go of its memory.
struct PlainMemory {
  char* data;
  uint64_t nbytes;
  py::object type;
};

std::optional<PlainMemory> plain_memory(PyObject* x, bool written, bool may_be_tensor) {
  if (const auto memory = stretch(x, written)) {
    const auto type = reinterpret_cast<PyObject*>(py::detail::array_proxy(x)->descr);
    return PlainMemory{reinterpret_cast<char*>(memory->first), memory->second,
                       py::reinterpret_borrow<py::object>(type)};
  }
  ArrayKey key;
  ArrayMemory memory;
  if (!may_be_tensor || x == Py_None) return std::nullopt;
  const bool plain = describe_array(nullptr, x, written, key, memory) && !memory.scattered;
  if (!plain || key.element == 0) return std::nullopt;
  return PlainMemory{memory.data, memory.nbytes, py::int_(key.element)};
}

std::optional<PlainMessage> plain_message(const py::dict& types, PyObject* x, bool incoming,
                                          PyObject* peer, uint32_t ranks, PyObject* tag,
                                          bool may_be_tensor) {
  const auto rank = incoming ? plain_source(peer, ranks) : plain_number(peer, 0, ranks);
  const auto label = plain_number(tag, 0, kTags);
  const auto memory = rank && label ? plain_memory(x, incoming, may_be_tensor) : std::nullopt;
  if (!memory) return std::nullopt;
  PyObject* const number = PyDict_GetItemWithError(types.ptr(), memory->type.ptr());
  if (number == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (number == nullptr) return std::nullopt;
  return PlainMessage{memory->data, memory->nbytes,
                      static_cast<uint32_t>(PyLong_AsUnsignedLong(number)),
                      static_cast<int32_t>(*rank), static_cast<uint32_t>(*label)};
}

// The array that is sent, or an array of the bytes of the tensor.
py::object array_of(PyObject* x, const PlainMessage& m) {
  if (stretch(x, false)) return py::reinterpret_borrow<py::object>(x);
  return py::array(py::dtype::of<uint8_t>(), {py::ssize_t(m.nbytes)}, m.data, py::handle(x));
}

// Raises what a call raises that this error has ended.
[[noreturn]] void raise_failure(const FastcallState& state, PyObject* sent, bool receives) {
  const py::error_already_set error;
  const py::object given = sent == nullptr ? py::none() : py::reinterpret_borrow<py::object>(sent);
  session_of(state).attr("message_failed")(error.value(), given, receives);
  throw py::type_error("message_failed has raised nothing");
}

// Moves messages without Python's lock.
template <typename F>
auto moved(const FastcallState& state, PyObject* sent, bool receives, const F& work) {
  try {
    const Unlocked unlocked;
    return work();
  } catch (const Error& error) {
    raise_in_python(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  raise_failure(state, sent, receives);
}

// What isend and irecv return, an object of a class.
PyObject* new_work(const FastcallState& state, const py::object& of, uint64_t ticket, PyObject* x,
                   bool sends) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("_session"), PyUnicode_InternFromString("_memory"),
      PyUnicode_InternFromString("_ticket"), PyUnicode_InternFromString("sends"),
      PyUnicode_InternFromString("_ended")};
  static PyObject* const under_way = PyUnicode_InternFromString("under_way");
  try {
    auto* const type = reinterpret_cast<PyTypeObject*>(of.ptr());
    const auto work =
        py::reinterpret_steal<py::object>(type->tp_new(type, py::tuple().ptr(), nullptr));
    if (!work) throw py::error_already_set();
    if (ticket == 0) return work.inc_ref().ptr();  // it has been sent
    const py::object session = session_of(state), number = py::int_(ticket);
    PyObject* const values[] = {session.ptr(), x, number.ptr(), sends ? Py_True : Py_False,
                                Py_False};
    for (size_t i = 0; i < std::size(names); ++i) {
      if (PyObject_SetAttr(work.ptr(), names[i], values[i]) != 0) throw py::error_already_set();
    }
    const auto all = py::reinterpret_steal<py::object>(PyObject_GetAttr(session.ptr(), under_way));
    if (!all || PySet_Add(all.ptr(), work.ptr()) != 0) throw py::error_already_set();
    return work.inc_ref().ptr();
  } catch (...) {
    if (ticket != 0) Py_INCREF(x);  // it is under way, and nobody knows of it
    throw;
  }
}

// A call on the postbox of a host, or of messages.
template <typename Box>
class Call {
 public:
  Call(const FastcallState& state, std::shared_ptr<Box> box, PyObject* const* args)
      : state_(state), box_(std::move(box)), args_(args) {}

  PyObject* run(MessageCall call, double limit_s) {
    switch (call) {
      case MessageCall::kSend:
        return send(limit_s);
      case MessageCall::kRecv:
        return recv(limit_s);
      case MessageCall::kIsend:
        return isend();
      case MessageCall::kIrecv:
        return irecv();
      case MessageCall::kSendrecv:
        return sendrecv(limit_s);
    }
    return nullptr;
  }

 private:
  static PyObject* not_served() { return Py_NewRef(Py_NotImplemented); }

  auto going(bool may_be_tensor = false) {
    return plain_message(state_.messages.types, args_[kData], false, args_[kTo], box_->world_size(),
                         args_[kTag], may_be_tensor);
  }
  auto coming(PyObject* tag, bool may_be_tensor = false) {
    return plain_message(state_.messages.types, args_[kInto], true, args_[kFrom],
                         box_->world_size(), tag, may_be_tensor);
  }
  // Keeps the array of a message that comes where it is: it would be lost if another thread moved
  // the array back while it comes.
  HoldOf held(const PlainMessage& m) const { return {state_.heap.get(), m.data, m.nbytes}; }
  uint64_t post(const PlainMessage& m) {
    return moved(state_, args_[kData], false,
                 [&] { return box_->send(m.data, m.nbytes, m.type, uint32_t(m.peer), m.tag); });
  }
  uint64_t expect(const PlainMessage& m) {
    return moved(state_, nullptr, false,
                 [&] { return box_->recv(m.data, m.nbytes, m.type, m.peer, m.tag); });
  }

  PyObject* send(double limit_s) {
    const auto m = going(true);
    if (!m) return not_served();
    if (const uint64_t ticket = post(*m); ticket != 0) {
      session_of(state_).attr("leave_behind")(ticket, array_of(args_[kData], *m), limit_s);
    }
    Py_RETURN_NONE;
  }

  PyObject* recv(double limit_s) {
    const auto m = coming(args_[kTag], true);
    if (!m) return not_served();
    const HoldOf hold = held(*m);
    return PyLong_FromUnsignedLong(moved(state_, nullptr, true, [&] {
      if constexpr (std::is_same_v<Box, MessagePostbox>) {
        return box_->recv(m->data, m->nbytes, m->type, m->peer, m->tag, limit_s);
      } else {
        return box_->take(m->data, m->nbytes, m->type, m->peer, m->tag, limit_s);
      }
    }));
  }

  PyObject* isend() {
    const auto m = going();
    const py::object work = state_.messages.work;  // as box_
    return m ? new_work(state_, work, post(*m), args_[kData], true) : not_served();
  }

  PyObject* irecv() {
    const auto m = coming(args_[kTag]);
    const py::object work = state_.messages.work;
    // Python code notes that the message may come into a registered array at any time.
    const Heap* const heap = state_.heap.get();
    if (m && heap != nullptr && heap->is_aliased(m->data, m->nbytes)) return not_served();
    return m ? new_work(state_, work, expect(*m), args_[kInto], false) : not_served();
  }

  PyObject* sendrecv(double limit_s) {
    const auto out = going(true);
    const auto in = coming(args_[kTagInto] == Py_None ? args_[kTag] : args_[kTagInto], true);
    if (!out || !in || out->data == in->data) return not_served();
    const HoldOf hold = held(*in);
    const uint64_t first = expect(*in);
    const auto [source, second] = moved(state_, args_[kData], false, [&] {
      try {
        const uint64_t ticket =
            box_->send(out->data, out->nbytes, out->type, uint32_t(out->peer), out->tag);
        return std::pair(ticket == 0 ? box_->wait(first, limit_s) : 0, ticket);
      } catch (...) {
        box_->forget(first);
        throw;
      }
    });
    if (second == 0) return PyLong_FromUnsignedLong(source);
    const py::object x = array_of(args_[kData], *out);
    return session_of(state_).attr("finish_exchange")(first, second, x, limit_s).release().ptr();
  }

  const FastcallState& state_;
  const std::shared_ptr<Box> box_;  // another thread may close it meanwhile
  PyObject* const* const args_;
};

}  // namespace

PyObject* call_message(PyObject* fastcall, MessageCall call, PyObject* const* args) {
  const FastcallState& state = state_of(fastcall);
  const MessagePath& path = state.messages;
  const auto limit_s = limit_of(args[kWithin]);
  if (!limit_s || args[kOnStream] != Py_None) return Py_NewRef(Py_NotImplemented);
  const double limit = args[kWithin] == Py_None ? path.limit_s : *limit_s;
  if (path.host != nullptr) return Call(state, path.host, args).run(call, limit);
  if (path.wire != nullptr) return Call(state, path.wire, args).run(call, limit);
  return Py_NewRef(Py_NotImplemented);
}

PyObject* use_messages(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 4) throw py::type_error("use_messages takes postbox, types, work and limit_s");
    const auto given = [&](int i) { return py::reinterpret_borrow<py::object>(args[i]); };
    MessagePath path{
        .limit_s = given(3).cast<double>(), .types = given(1).cast<py::dict>(), .work = given(2)};
    if (py::isinstance<Postbox>(args[0])) {
      path.host = given(0).cast<std::shared_ptr<Postbox>>();
    } else {
      path.wire = given(0).cast<std::shared_ptr<MessagePostbox>>();
    }
    state_of(fastcall).messages = std::move(path);
    Py_RETURN_NONE;
  });
}

}  // namespace pycoll
