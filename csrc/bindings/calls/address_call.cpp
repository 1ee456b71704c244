// A bound call as a function of two addresses, for callers in Python that look at arrays
// themselves, and that a call of the engine's method `run` would cost a microsecond more; and a
// table of such calls, which looks at tensors itself:
//
//   calls = InPlaceCalls(lock, jobs, group, profiler, timeout_s)
//   calls.keep(tensor, op, call); calls(tensor, op)
//
// makes the call that was kept for this very object `op` and a tensor of the same type and number
// of elements, on the tensor's memory, and holds the lock meanwhile. It returns False, and does
// nothing, if there is none, if the tensor is not plain elements on the CPU that DLPack's C
// exchange API shows, if `jobs` is not empty, or if `group.symmetric` or
// `profiler._is_profiler_enabled` is true. Two frames of PyTorch's are between it and the line that
// errors name, whose number `group.sites` knows.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/calls/dlpack.h"
#include "bindings/calls/fast_path.h"
#include "bindings/calls/python_frame.h"

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

// False with a Python error set if the call has failed.
bool run_address(const AddressCall* given, const void* x, void* out, uint32_t site,
                 double timeout_s) {
  // Kept here, as another thread may close and drop them while this one waits.
  const std::shared_ptr<Engine> engine = given->engine.lock();
  const std::shared_ptr<const BoundCall> bound = given->bound;
  const std::optional<Error> error =
      engine == nullptr ? Error("CommClosed", "this communicator has been closed")
                        : error_of_call(engine.get(), bound.get(),
                                        [&] { engine->run(*bound, x, out, site, timeout_s); });
  if (error.has_value()) raise_in_python(*error);
  return !error.has_value();
}

PyObject* call_address(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (PyVectorcall_NARGS(nargsf) != 4 || keywords != nullptr) {
      throw py::type_error("an AddressCall takes x, out, site and timeout_s, by position");
    }
    const void* const x = address_of(args[0]);
    void* const out = address_of(args[1]);
    const auto site = static_cast<uint32_t>(PyLong_AsUnsignedLongMask(args[2]));
    const double timeout_s = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const auto* call = reinterpret_cast<AddressCall*>(self);
    if (!run_address(call, x, out, site, timeout_s)) return nullptr;
    Py_RETURN_NONE;
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

// What calls in place on tensors share.
struct InPlace {
  PyObject* op;  // compared by identity; kept by the entry
  int kind, bits;
  int64_t count;
  auto operator<=>(const InPlace&) const = default;
};

struct InPlaceEntry {
  py::object op, call;
};

using InPlaceEntries = std::map<InPlace, InPlaceEntry>;

struct InPlaceTable {
  py::object acquire, release;  // methods of a lock
  py::object jobs, group, sites, profiler;
  InPlaceEntries entries;
  KnownPlaces places;
};

struct InPlaceCalls {
  PyObject_HEAD vectorcallfunc vectorcall;
  InPlaceTable* table;
  double timeout_s;
};

// Holds a lock of Python's. An error that is set stays.
class HeldLock {
 public:
  explicit HeldLock(const InPlaceTable& table) : release_(table.release) { table.acquire(); }
  ~HeldLock() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(release_.ptr()));
    if (type != nullptr) PyErr_Restore(type, value, trace);
  }
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;

 private:
  const py::object release_;
};

bool is_true(const py::object& owner, PyObject* name) {
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(owner.ptr(), name));
  if (!found) PyErr_Clear();
  return found && PyObject_IsTrue(found.ptr()) == 1;
}

// Whether a call in the background, symmetric memory or a profiler wants more of a call.
bool is_plain(const InPlaceTable& table) {
  static PyObject* const symmetric = PyUnicode_InternFromString("symmetric");
  static PyObject* const profiled = PyUnicode_InternFromString("_is_profiler_enabled");
  return PyObject_IsTrue(table.jobs.ptr()) == 0 && !is_true(table.group, symmetric) &&
         !is_true(table.profiler, profiled);
}

// The number of the line that called PyTorch's function, which is the frame around the innermost.
uint32_t line_of_program(InPlaceTable& table) {
  const CodePlace place = outer_place(2);
  KnownPlace& known = table.places[place];
  if (place.code && known.is(place)) return known.number;
  const py::object own = place.code ? table.sites.attr("of")(3) : py::none();
  if (own.is_none()) return table.sites.attr("here")(2).cast<uint32_t>();
  known = {place, own.cast<uint32_t>()};
  return known.number;
}

// Whether the sign of a tensor's elements is kept beside them.
bool is_negated(PyObject* tensor) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  const auto found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, is_neg));
  if (!found) throw py::error_already_set();
  return found.ptr() == Py_True;
}

// The elements of a plain tensor on the CPU; null of any other.
char* plain_elements(PyObject* tensor, InPlace& key) {
  const std::optional<SeenTensor> seen = see_tensor(tensor);
  if (!seen || !seen->on_cpu || seen->data == nullptr) return nullptr;
  key.kind = seen->kind;
  key.bits = seen->bits;
  key.count = 1;
  for (int i = seen->ndim - 1; i >= 0; --i) {
    const int64_t size = seen->shape[i];
    if (size != 1 && seen->strides != nullptr && seen->strides[i] != key.count) return nullptr;
    key.count *= size;
  }
  return seen->data;
}

PyObject* call_in_place(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (PyVectorcall_NARGS(nargsf) != 2 || keywords != nullptr) {
      throw py::type_error("InPlaceCalls takes tensor and op, by position");
    }
    const auto* calls = reinterpret_cast<InPlaceCalls*>(self);
    if (calls->table == nullptr || !is_plain(*calls->table)) Py_RETURN_FALSE;
    InPlaceTable& table = *calls->table;
    InPlace key{args[1], 0, 0, 0};
    char* const data = plain_elements(args[0], key);
    if (data == nullptr) Py_RETURN_FALSE;
    const auto found = table.entries.find(key);
    if (found == table.entries.end()) Py_RETURN_FALSE;
    const py::object call = found->second.call;  // another thread may clear the table
    const int itemsize = key.bits / 8;
    if (!has_memory(args[0], uint64_t(key.count) * itemsize, itemsize) || is_negated(args[0])) {
      Py_RETURN_FALSE;
    }
    const uint32_t site = line_of_program(table);
    const HeldLock locked(table);
    const auto* made = reinterpret_cast<AddressCall*>(call.ptr());
    if (!run_address(made, data, data, site, calls->timeout_s)) return nullptr;
    Py_RETURN_TRUE;
  });
}

PyObject* keep_in_place(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 3 || Py_TYPE(args[2])->tp_dealloc != destroy_address_call) {
      throw py::type_error("keep takes tensor, op and an AddressCall");
    }
    InPlace key{args[1], 0, 0, 0};
    InPlaceTable* const table = reinterpret_cast<InPlaceCalls*>(self)->table;
    if (table != nullptr && plain_elements(args[0], key) != nullptr && key.bits >= 8) {
      table->entries[key] = {py::reinterpret_borrow<py::object>(args[1]),
                             py::reinterpret_borrow<py::object>(args[2])};
    }
    Py_RETURN_NONE;
  });
}

PyObject* create_in_place(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 5) {
      throw py::type_error("InPlaceCalls takes lock, jobs, group, profiler and timeout_s");
    }
    auto table = std::make_unique<InPlaceTable>();
    table->acquire = given[0].attr("acquire");
    table->release = given[0].attr("release");
    table->jobs = given[1];
    table->group = given[2];
    table->sites = given[2].attr("sites");
    table->profiler = given[3];
    const auto timeout_s = given[4].cast<double>();
    auto* self = reinterpret_cast<InPlaceCalls*>(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->vectorcall = call_in_place;
    self->table = table.release();
    self->timeout_s = timeout_s;
    return reinterpret_cast<PyObject*>(self);
  });
}

// A group holds its calls, and they hold the group: Python's collector has to see the cycle.
int visit_in_place(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const InPlaceTable* const table = reinterpret_cast<InPlaceCalls*>(self)->table;
  if (table == nullptr) return 0;
  for (const py::object* held : {&table->acquire, &table->release, &table->jobs, &table->group,
                                 &table->sites, &table->profiler}) {
    Py_VISIT(held->ptr());
  }
  for (const auto& [key, entry] : table->entries) {
    Py_VISIT(entry.op.ptr());
    Py_VISIT(entry.call.ptr());
  }
  return 0;
}

// From then on the object knows no call.
int break_in_place(PyObject* self) {
  delete std::exchange(reinterpret_cast<InPlaceCalls*>(self)->table, nullptr);
  return 0;
}

void destroy_in_place(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  break_in_place(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* clear_in_place(PyObject* self, PyObject*) {
  InPlaceTable* const table = reinterpret_cast<InPlaceCalls*>(self)->table;
  if (table != nullptr) InPlaceEntries().swap(table->entries);  // whose ends may call in here again
  Py_RETURN_NONE;
}

void add_call_type(py::module_& m, const char* name, PyType_Spec spec) {
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr(name) = type;
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
  constexpr unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  add_call_type(m, "AddressCall", {"pycoll._C.AddressCall", sizeof(AddressCall), 0, flags, slots});

  static PyMemberDef members_in_place[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(InPlaceCalls, vectorcall), READONLY, nullptr},
      {"timeout_s", T_DOUBLE, offsetof(InPlaceCalls, timeout_s), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyMethodDef methods_in_place[] = {
      {"keep", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(keep_in_place)),
       METH_FASTCALL, "Keep the call of tensors like this one."},
      {"clear", clear_in_place, METH_NOARGS, "Forget all calls."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots_in_place[] = {{Py_tp_new, reinterpret_cast<void*>(create_in_place)},
                                         {Py_tp_dealloc, reinterpret_cast<void*>(destroy_in_place)},
                                         {Py_tp_traverse, reinterpret_cast<void*>(visit_in_place)},
                                         {Py_tp_clear, reinterpret_cast<void*>(break_in_place)},
                                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                         {Py_tp_members, members_in_place},
                                         {Py_tp_methods, methods_in_place},
                                         {0, nullptr}};
  add_call_type(m, "InPlaceCalls",
                {"pycoll._C.InPlaceCalls", sizeof(InPlaceCalls), 0, flags | Py_TPFLAGS_HAVE_GC,
                 slots_in_place});
}

}  // namespace pycoll
