#include "bindings/p2p/message_work.h"

#include <structmember.h>

#include <new>
#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/calls/fast_path.h"

namespace py = pybind11;
namespace pycoll {
namespace {

struct Message {
  PyObject_HEAD PyObject *session, *memory, *error, *source;
  PyObject* under_way;  // the set
  unsigned long long ticket;
  double limit_s;
  char sends, ended;
  char awaited;  // by a thread, from before it waits until what it has found is noted here
  Boxes boxes;
};

PyTypeObject* message_type = nullptr;

Message& message_of(PyObject* self) { return *reinterpret_cast<Message*>(self); }

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Message& message = message_of(self);
  new (&message.boxes) Boxes();
  message.sends = message.ended = 1;
  return self;
}

void begin(PyObject* self, const Beginning& beginning) {
  static PyObject* const name = PyUnicode_InternFromString("under_way");
  Message& message = message_of(self);
  if (message.session != nullptr) throw py::type_error("the message has begun");
  message.boxes = beginning.boxes;
  message.ticket = beginning.ticket;
  message.limit_s = beginning.limit_s;
  message.sends = beginning.sends;
  message.session = Py_NewRef(beginning.session.ptr());
  message.memory = Py_NewRef(beginning.memory);
  message.ended = 0;
  message.under_way = PyObject_GetAttr(message.session, name);
  if (message.under_way == nullptr || PySet_Add(message.under_way, self) != 0) {
    throw py::error_already_set();
  }
}

void end(PyObject* self) {
  Message& message = message_of(self);
  message.ended = 1;
  message.boxes = {};
  Py_CLEAR(message.memory);
  if (message.under_way != nullptr && PySet_Discard(message.under_way, self) < 0) {
    throw py::error_already_set();
  }
}

PyObject* raise(PyObject* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  return nullptr;
}

PyObject* refuse(const Message& message) {
  const std::string text = "another thread waits for message " + std::to_string(message.ticket);
  return raise(py::handle(message.session).attr("error")("ConcurrentUseError", text).ptr());
}

// A message that a thread waits for.
class Awaited {
 public:
  explicit Awaited(Message& message) : message_(message) { message.awaited = 1; }
  ~Awaited() { message_.awaited = 0; }
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;

 private:
  Message& message_;
};

// Waits without Python's lock; null with a Python error set if the message has failed.
std::optional<uint32_t> wait(const Message& message, double limit_s) {
  const Boxes boxes = message.boxes;  // another thread may close the communicator meanwhile
  const uint64_t ticket = message.ticket;
  try {
    COLL_CHECK(boxes.host != nullptr || boxes.wire != nullptr, "CommClosed",
               "the communicator was closed before message ", ticket, " had begun");
    const Unlocked unlocked;
    return boxes.host != nullptr ? boxes.host->wait(ticket, limit_s)
                                 : boxes.wire->wait(ticket, limit_s);
  } catch (const Error& error) {
    raise_in_python(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  return std::nullopt;
}

PyObject* begin_method(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 6) throw py::type_error("_begin takes 6 arguments");
    begin(self, {Boxes::of(args[0]), py::reinterpret_borrow<py::object>(args[1]),
                 py::handle(args[2]).cast<uint64_t>(), args[3], py::handle(args[4]).cast<bool>(),
                 py::handle(args[5]).cast<double>()});
    Py_RETURN_NONE;
  });
}

// Waits for a message that has not ended; false if another thread does.
bool take(PyObject* self, double limit_s) {
  Message& message = message_of(self);
  if (message.awaited) return false;
  const Awaited awaited(message);
  if (const auto source = wait(message, limit_s)) {
    if (!message.sends) Py_XSETREF(message.source, PyLong_FromUnsignedLong(*source));
    end(self);
  } else {
    const py::error_already_set error;
    py::handle(self).attr("_fail")(error.value());
  }
  return true;
}

double checked(PyObject* timeout) {
  using namespace pybind11::literals;
  const auto check = py::module_::import("pycoll.config").attr("check_timeout");
  return check(py::handle(timeout), "zero"_a = true).cast<double>();
}

PyObject* wait_method(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return guarded([&]() -> PyObject* {
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (nargs + named > 1) throw py::type_error("wait() takes one argument, timeout");
    if (named == 1 &&
        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") != 0) {
      throw py::type_error("wait() takes one argument, timeout");
    }
    const Message& message = message_of(self);
    const bool limited = nargs + named == 1 && args[0] != Py_None;
    const double limit_s = limited ? checked(args[0]) : message.limit_s;
    if (!message.ended && !take(self, limit_s)) return refuse(message);
    if (message.error != nullptr && message.error != Py_None) return raise(message.error);
    return Py_NewRef(message.source == nullptr ? Py_None : message.source);
  });
}

PyObject* end_method(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    end(self);
    Py_RETURN_NONE;
  });
}

PyObject* take_back_method(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const Message& message = message_of(self);
    if (message.awaited) return refuse(message);
    py::object memory =
        message.memory == nullptr ? py::none() : py::reinterpret_borrow<py::object>(message.memory);
    end(self);
    return memory.release().ptr();
  });
}

PyObject* close_method(PyObject* self, PyObject*) {
  message_of(self).boxes = {};
  Py_RETURN_NONE;
}

constexpr char kWait[] =
    "wait($self, /, timeout=None)\n--\n\n"
    R"(Wait for the message.

Args:
    timeout: Seconds; by default those of the communicator.

Returns:
    The rank that sent it, or None for a message that was sent.

Raises:
    ArgumentError: If ``timeout`` is no number of seconds, 0 or more.
    CollTimeout: If it is not done in time; it goes on and may be waited for again.
    CollError: What the blocking call would have raised.
)";

int traverse(PyObject* self, visitproc visit, void* arg) {
  const Message& message = message_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(message.session);
  Py_VISIT(message.memory);
  Py_VISIT(message.error);
  Py_VISIT(message.source);
  Py_VISIT(message.under_way);
  return 0;
}

int clear(PyObject* self) {
  Message& message = message_of(self);
  Py_CLEAR(message.session);
  Py_CLEAR(message.memory);
  Py_CLEAR(message.error);
  Py_CLEAR(message.source);
  Py_CLEAR(message.under_way);
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  message_of(self).boxes.~Boxes();
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

Boxes Boxes::of(py::handle postbox) {
  if (py::isinstance<Postbox>(postbox)) return {postbox.cast<std::shared_ptr<Postbox>>(), nullptr};
  return {nullptr, postbox.cast<std::shared_ptr<MessagePostbox>>()};
}

bool is_message_work(PyObject* type) {
  return PyType_Check(type) &&
         PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), message_type) != 0;
}

py::object new_message_work(const py::object& type, const Beginning& beginning) {
  auto* const made = reinterpret_cast<PyTypeObject*>(type.ptr());
  const auto work = py::reinterpret_steal<py::object>(create(made, nullptr, nullptr));
  if (!work) throw py::error_already_set();
  if (beginning.ticket != 0) begin(work.ptr(), beginning);
  return work;
}

void add_message_work(py::module_& m) {
  static PyMemberDef members[] = {
      {"_session", T_OBJECT, offsetof(Message, session), READONLY, nullptr},
      {"_memory", T_OBJECT, offsetof(Message, memory), READONLY, nullptr},
      {"_error", T_OBJECT, offsetof(Message, error), 0, nullptr},
      {"_source", T_OBJECT, offsetof(Message, source), READONLY, nullptr},
      {"_ticket", T_ULONGLONG, offsetof(Message, ticket), READONLY, nullptr},
      {"sends", T_BOOL, offsetof(Message, sends), READONLY, nullptr},
      {"_ended", T_BOOL, offsetof(Message, ended), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyMethodDef methods[] = {
      {"_begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(begin_method)),
       METH_FASTCALL, nullptr},
      {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait_method)),
       METH_FASTCALL | METH_KEYWORDS, kWait},
      {"_end", end_method, METH_NOARGS, nullptr},
      {"_take_back", take_back_method, METH_NOARGS, nullptr},
      {"_close", close_method, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_members, members},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycoll._C.Message", sizeof(Message), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr("Message") = type;
  message_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
}

}  // namespace pycoll
