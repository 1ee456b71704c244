// Methods of the communicator class whose body is the engine; see fast_path.h.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "bindings/calls/fast_path.h"
#include "bindings/calls/object_calls.h"
#include "bindings/calls/sized_calls.h"
#include "bindings/p2p/message_calls.h"

namespace py = pybind11;
namespace pycoll {
namespace {

struct Signature {
  std::array<py::object, kArgs> names;     // interned; null where there is no such parameter
  std::array<py::object, kArgs> defaults;  // null where the argument must be given
  std::array<int, kArgs> positional{};
  Py_ssize_t positional_count = 0;
  bool in_place = false;  // without `out`, the result takes the place of `x`
  // Of all but collectives: the Python function that serves what is not usual, what else does, and
  // of a message which one it is.
  py::object function;
  PyObject* (*body)(PyObject* fastcall, PyObject* const* args) = nullptr;
  std::optional<MessageCall> message;
};

struct Method {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* dict;
  Signature* signature;
};

// What has such methods. The hot path is at a fixed place in it: looking an attribute up takes a
// tenth of the instructions of a tiny call.
struct Caller {
  PyObject_HEAD PyObject* fast;
};

PyTypeObject* caller_type = nullptr;
PyTypeObject* known_type = nullptr;  // the latest one seen that is, or derives from, caller_type

// The Fastcall of an object. Throws TypeError if it cannot have one, and what its _closed() raises
// if it has none any more.
py::object fast_of(PyObject* self) {
  if (Py_TYPE(self) != known_type) {
    if (!PyObject_TypeCheck(self, caller_type)) {
      throw py::type_error(std::string("it is a method of communicators, and not of ") +
                           Py_TYPE(self)->tp_name);
    }
    PyTypeObject* const before = known_type;
    known_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(Py_TYPE(self)));
    Py_XDECREF(before);
  }
  PyObject* const fast = reinterpret_cast<Caller*>(self)->fast;
  if (fast != nullptr) return py::reinterpret_borrow<py::object>(fast);
  py::handle(self).attr("_closed")();
  throw py::type_error("the object has not been initialised");
}

int place_of(const Signature& signature, PyObject* name) {
  for (int i = 0; i < kArgs; ++i) {
    if (signature.names[i].ptr() == name) return i;
  }
  for (int i = 0; i < kArgs; ++i) {
    const py::object& known = signature.names[i];
    if (known && PyUnicode_Compare(known.ptr(), name) == 0) return i;
  }
  const auto shown = py::repr(py::handle(name)).cast<std::string>();
  throw py::type_error("got an unexpected keyword argument " + shown);
}

// Puts the arguments of a call where they belong. Raises TypeError as Python would, less the name.
void spread(const Signature& signature, PyObject* const* args, Py_ssize_t nargs, PyObject* keywords,
            PyObject** all) {
  for (int i = 0; i < kArgs; ++i) all[i] = signature.defaults[i].ptr();
  if (nargs > signature.positional_count) {
    const char* noun = signature.positional_count == 0 ? " argument but " : " arguments but ";
    throw py::type_error("takes " + std::to_string(signature.positional_count + 1) + " positional" +
                         noun + std::to_string(nargs + 1) + " were given");
  }
  for (Py_ssize_t i = 0; i < nargs; ++i) all[signature.positional[i]] = args[i];
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < count; ++k) {
    const int place = place_of(signature, PyTuple_GET_ITEM(keywords, k));
    const auto* given = signature.positional.data();
    if (std::find(given, given + nargs, place) != given + nargs) {
      throw py::type_error("got multiple values for argument " +
                           py::repr(signature.names[place]).cast<std::string>());
    }
    all[place] = args[nargs + k];
  }
  for (int i = 0; i < kArgs; ++i) {
    if (all[i] == nullptr) {
      throw py::type_error("missing 1 required argument: " +
                           py::repr(signature.names[i]).cast<std::string>());
    }
  }
}

// The qualified name, which functools.update_wrapper has set, and "() ".
std::string called(PyObject* self) {
  PyObject* dict = reinterpret_cast<Method*>(self)->dict;
  PyObject* name = dict != nullptr ? PyDict_GetItemString(dict, "__qualname__") : nullptr;
  return name == nullptr ? "" : py::str(py::handle(name)).cast<std::string>() + "() ";
}

// Serves what is no collective, or leaves it to Python code.
PyObject* call_or_python(const Signature& signature, const py::object& fast, PyObject* const* all,
                         PyObject* const* args, size_t nargs, PyObject* keywords) {
  PyObject* const result = signature.message ? call_message(fast.ptr(), *signature.message, all)
                                             : signature.body(fast.ptr(), all);
  if (result != Py_NotImplemented) return result;
  Py_DECREF(result);
  return PyObject_Vectorcall(signature.function.ptr(), args, nargs, keywords);
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Signature& signature = *reinterpret_cast<Method*>(self)->signature;
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    if (nargs < 1) throw py::type_error("missing 1 required argument: 'self'");
    const py::object fast = fast_of(args[0]);
    PyObject* all[kArgs];
    try {
      spread(signature, args + 1, nargs - 1, keywords, all);
    } catch (const py::type_error& error) {
      PyObject* const function = signature.function.ptr();  // it says so in its own words
      if (function != nullptr) return PyObject_Vectorcall(function, args, size_t(nargs), keywords);
      return refuse_call(fast.ptr(), (called(self) + error.what()).c_str());
    }
    if (signature.function) {
      return call_or_python(signature, fast, all, args, size_t(nargs), keywords);
    }
    if (signature.in_place && all[kOut] == Py_None) all[kOut] = all[kX];
    return call_fast_or_slow(fast.ptr(), all);
  });
}

PyObject* get(PyObject* self, PyObject* object, PyObject*) {
  if (object != nullptr && object != Py_None) return PyMethod_New(self, object);
  return Py_NewRef(self);
}

PyObject* create_method(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 7) {
      throw py::type_error(
          "Method takes kind, names, positional, defaults, in_place, function, of_objects");
    }
    auto signature = std::make_unique<Signature>();
    const auto names = given[1].cast<py::tuple>();
    const auto positional = given[2].cast<py::tuple>();
    const auto defaults = given[3].cast<py::tuple>();
    const size_t count = names.size();
    if (count > kArgs || defaults.size() != count || positional.size() > count) {
      throw py::type_error("Method: names and defaults have one entry per argument");
    }
    signature->defaults.fill(py::none());
    for (size_t i = 0; i < count; ++i) {
      if (!names[i].is_none()) signature->names[i] = names[i];
      const bool required = !names[i].is_none() && defaults[i].is(names[i]);
      signature->defaults[i] = required ? py::object() : py::object(defaults[i]);
    }
    signature->defaults[kKind] = given[0];
    signature->in_place = given[4].cast<bool>();
    if (!given[5].is_none()) {
      signature->function = given[5];
      signature->body = given[6].cast<bool>() ? call_object : call_sized;
      if (PyLong_CheckExact(given[0].ptr())) {
        signature->message = static_cast<MessageCall>(given[0].cast<int>());
      }
    }
    signature->positional_count = static_cast<Py_ssize_t>(positional.size());
    for (size_t i = 0; i < positional.size(); ++i) {
      signature->positional[i] = positional[i].cast<int>();
    }
    auto* self = reinterpret_cast<Method*>(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->vectorcall = call;
    self->signature = signature.release();
    return reinterpret_cast<PyObject*>(self);
  });
}

int traverse_method(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Method*>(self)->dict);
  return 0;
}

int clear_method(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Method*>(self)->dict);
  return 0;
}

void destroy_method(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_method(self);
  delete reinterpret_cast<Method*>(self)->signature;
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse_caller(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Caller*>(self)->fast);
  return 0;
}

int clear_caller(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Caller*>(self)->fast);
  return 0;
}

void destroy_caller(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_caller(self);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

void add_caller(py::module_& m) {
  static PyMemberDef members[] = {{"_fast", T_OBJECT, offsetof(Caller, fast), 0, nullptr},
                                  {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroy_caller)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_caller)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_caller)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycoll._C.Caller", sizeof(Caller), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr("Caller") = type;
  caller_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
}

void add_method(py::module_& m) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Method, dict), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef fields[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create_method)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy_method)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_method)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_method)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(get)},
                                {Py_tp_members, members},
                                {Py_tp_getset, fields},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycoll._C.Method", sizeof(Method), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_METHOD_DESCRIPTOR,
                             slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr("Method") = type;
}

}  // namespace pycoll
