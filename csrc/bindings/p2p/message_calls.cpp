#include "bindings/p2p/message_calls.h"

#include <initializer_list>
#include <new>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/calls/fast_path.h"
#include "bindings/calls/registered_calls.h"
#include "bindings/calls/remembered_calls.h"
#include "bindings/p2p/message_bytes.h"
#include "bindings/p2p/plain_message.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr Py_ssize_t kMostCopied = 4096;  // bytes: a slice of them takes less than a view

// Raises what a call raises that this error has ended.
[[noreturn]] void raise_failure(const FastcallState& state, PyObject* sent, bool receives) {
  const py::error_already_set error;
  const py::object given = sent == nullptr ? py::none() : py::reinterpret_borrow<py::object>(sent);
  session_of(state).attr("message_failed")(error.value(), given, receives);
  throw py::type_error("message_failed has raised nothing");
}

// Calls what moves messages.
template <typename F>
auto guarded_move(const FastcallState& state, PyObject* sent, bool receives, const F& work) {
  try {
    return work();
  } catch (const Error& error) {
    raise_in_python(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  raise_failure(state, sent, receives);
}

// Likewise, without Python's lock.
template <typename F>
auto moved(const FastcallState& state, PyObject* sent, bool receives, const F& work) {
  return guarded_move(state, sent, receives, [&] {
    const Unlocked unlocked;
    return work();
  });
}

// The function may go from where it was found while it runs.
py::object called(py::object function, std::initializer_list<PyObject*> args) {
  PyObject* const made = PyObject_Vectorcall(function.ptr(), args.begin(), args.size(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// What isend and irecv return, an object of a class.
PyObject* new_work(const FastcallState& state, const Boxes& boxes, const py::object& of,
                   uint64_t ticket, PyObject* x, bool sends) {
  try {
    const Beginning beginning{boxes, session_of(state), ticket, x, sends, state.messages.limit_s};
    return new_message_work(of, beginning).release().ptr();
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
      case MessageCall::kSendObject:
        return send_object(limit_s);
      case MessageCall::kRecvObject:
        return recv_object(limit_s);
    }
    return nullptr;
  }

 private:
  static PyObject* not_served() { return Py_NewRef(Py_NotImplemented); }

  auto going() {
    return plain_message(state_.messages.types, args_[kData], false, args_[kTo], box_->world_size(),
                         args_[kTag]);
  }
  auto coming(PyObject* tag) {
    return plain_message(state_.messages.types, args_[kInto], true, args_[kFrom],
                         box_->world_size(), tag);
  }
  // Keeps the array of a message that comes where it is: it would be lost if another thread moved
  // the array back while it comes.
  HoldOf held(const PlainMessage& m) const { return {state_.heap.get(), m.data, m.nbytes}; }
  uint64_t post(const PlainMessage& m, PyObject* x) {
    return moved(state_, x, false,
                 [&] { return box_->send(m.data, m.nbytes, m.type, uint32_t(m.peer), m.tag); });
  }
  // Sends a message that lies in an object, and returns when that may be changed.
  PyObject* send(const PlainMessage& m, PyObject* x, double limit_s) {
    if (const uint64_t ticket = post(m, x); ticket != 0) {
      session_of(state_).attr("leave_behind")(ticket, array_of(x, m), limit_s);
    }
    Py_RETURN_NONE;
  }
  uint64_t expect(const PlainMessage& m) {
    return moved(state_, nullptr, false,
                 [&] { return box_->recv(m.data, m.nbytes, m.type, m.peer, m.tag); });
  }

  PyObject* send(double limit_s) {
    const auto m = going();
    return m ? send(*m, args_[kData], limit_s) : not_served();
  }

  PyObject* recv(double limit_s) {
    const auto m = coming(args_[kTag]);
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
    const Boxes boxes = state_.messages.boxes;
    const py::object work = state_.messages.work;  // as box_
    if (!m) return not_served();
    const py::object x = holder_of(args_[kData]);
    return new_work(state_, boxes, work, post(*m, x.ptr()), x.ptr(), true);
  }

  PyObject* irecv() {
    const auto m = coming(args_[kTag]);
    const Boxes boxes = state_.messages.boxes;
    const py::object work = state_.messages.work;
    // Python code notes that the message may come into a registered array at any time.
    const Heap* const heap = state_.heap.get();
    if (!m || (heap != nullptr && heap->is_aliased(m->data, m->nbytes))) return not_served();
    const py::object x = holder_of(args_[kInto]);
    return new_work(state_, boxes, work, expect(*m), x.ptr(), false);
  }

  PyObject* sendrecv(double limit_s) {
    const auto out = going();
    const auto in = coming(args_[kTagInto] == Py_None ? args_[kTag] : args_[kTagInto]);
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

  PyObject* send_object(double limit_s) {
    const auto rank = plain_rank(args_[kTo], box_->world_size());
    const auto tag = plain_tag(args_[kTag]);
    if (!rank || !tag) return not_served();
    const uint32_t type = state_.messages.bytes;
    const py::object data = called(state_.messages.pack, {args_[kData], args_[kPickled]});
    const PlainMessage m{PyBytes_AS_STRING(data.ptr()), uint64_t(PyBytes_GET_SIZE(data.ptr())),
                         type, int32_t(*rank), uint32_t(*tag)};
    return send(m, data.ptr(), limit_s);
  }

  PyObject* recv_object(double limit_s) {
    const auto source = plain_rank_or_any(args_[kFrom], box_->world_size());
    const auto tag = plain_tag_or_any(args_[kTag]);
    if (!source || !tag || py::len(state_.messages.objects) > 0) return not_served();
    const py::object unpack = state_.messages.unpack;  // as box_
    const auto found = guarded_move(state_, nullptr, false, [&] {
      return take_bytes(*box_, state_.messages.bytes, int32_t(*source), *tag, limit_s);
    });
    if (!found) session_of(state_).attr("nothing_came")("recv_object", *source, limit_s);
    const py::int_ sender(found->second);
    py::object data = found->first;
    if (PyBytes_GET_SIZE(data.ptr()) > kMostCopied) data = py::memoryview(data);
    return called(unpack, {data.ptr(), args_[kPickled], sender.ptr()}).release().ptr();
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
  const auto& [host, wire] = path.boxes;
  if (host != nullptr) return Call(state, host, args).run(call, limit);
  if (wire != nullptr) return Call(state, wire, args).run(call, limit);
  return Py_NewRef(Py_NotImplemented);
}

PyObject* use_messages(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 5) throw py::type_error("use_messages takes five arguments");
    const auto given = [&](int i) { return py::reinterpret_borrow<py::object>(args[i]); };
    MessagePath path{
        .limit_s = given(3).cast<double>(), .types = given(1).cast<py::dict>(), .work = given(2)};
    const auto of_objects = given(4).cast<py::tuple>();
    path.pack = of_objects[0];
    path.unpack = of_objects[1];
    path.bytes = of_objects[2].cast<uint32_t>();
    path.objects = of_objects[3];
    if (!is_message_work(args[2])) throw py::type_error("work is no type of messages");
    if (args[0] != Py_None) path.boxes = Boxes::of(args[0]);
    state_of(fastcall).messages = std::move(path);
    Py_RETURN_NONE;
  });
}

}  // namespace pycoll
