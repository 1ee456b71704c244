// A bound call as a function of two addresses, for callers in Python that look at arrays
// themselves, and that a call of the engine's method `run` would cost a microsecond more.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/fast_path.h"
#include "bindings/gil.h"

namespace py = pybind11;
namespace pycoll {
namespace {

struct AddressCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::weak_ptr<Engine> engine;
  std::shared_ptr<const BoundCall> bound;
};

void* address_of(PyObject* number) {
  void* const address = PyLong_AsVoidPtr(number);
  if (address == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return address;
}

PyObject* call_address(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (PyVectorcall_NARGS(nargsf) != 4 || keywords != nullptr) {
      throw py::type_error("an AddressCall takes x, out, site and timeout_s, by position");
    }
    const auto* given = reinterpret_cast<AddressCall*>(self);
    // Kept here, as another thread may close and drop them while this one waits.
    const std::shared_ptr<Engine> engine = given->engine.lock();
    const std::shared_ptr<const BoundCall> bound = given->bound;
    const void* const x = address_of(args[0]);
    void* const out = address_of(args[1]);
    const auto site = static_cast<uint32_t>(PyLong_AsUnsignedLongMask(args[2]));
    const double timeout_s = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const std::optional<Error> error =
        engine == nullptr ? Error("CommClosed", "this communicator has been closed")
                          : error_of_call(engine.get(), bound.get(),
                                          [&] { engine->run(*bound, x, out, site, timeout_s); });
    if (!error.has_value()) Py_RETURN_NONE;
    raise_in_python(*error);
    return nullptr;
  });
}

PyObject* create_address_call(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 2) throw py::type_error("AddressCall takes engine and bound call");
    const auto engine = given[0].cast<std::shared_ptr<Engine>>();
    const auto bound = given[1].cast<std::shared_ptr<BoundCall>>();
    if (engine == nullptr || bound == nullptr) throw py::type_error("AddressCall takes no None");
    auto* self = reinterpret_cast<AddressCall*>(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->vectorcall = call_address;
    new (&self->engine) std::weak_ptr<Engine>(engine);
    new (&self->bound) std::shared_ptr<const BoundCall>(bound);
    return reinterpret_cast<PyObject*>(self);
  });
}

void destroy_address_call(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::destroy_at(&reinterpret_cast<AddressCall*>(self)->engine);
  std::destroy_at(&reinterpret_cast<AddressCall*>(self)->bound);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

void bind_address_call(py::module_& m) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(AddressCall, vectorcall), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create_address_call)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy_address_call)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycoll._C.AddressCall", sizeof(AddressCall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr("AddressCall") = type;
}

}  // namespace pycoll
