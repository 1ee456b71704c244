// Collectives that are prepared once to run many times: for arrays of one kind, and for arrays
// themselves.
//
//   plan = BoundPlan(fast, like, in_place, kind, op, root, order, algorithm, slow)
//   plan(x, out=None, timeout=None, async_op=False)
//
// makes a call of the Fastcall `fast` on an input of the shape and dtype of `like`. With `in_place`
// the result takes the place of `x` where there is no `out`. Whatever the hot path does not serve
// goes to `slow`, with the same arguments.
//
//   call = Persistent(fast, bound, x, out, result, keep, slow); call()
//
// runs `bound` on the memory at the addresses `x` and `out`, and returns `result`. `keep` is what
// the memory belongs to. Where `bound` is None, and once the communicator is closed, it is slow().
//
// Both are called from the line of the program that errors name, without a frame in between.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "bindings/calls/fast_path.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr const char* kCleared = "a plan cannot be called while the cycle it is in is collected";

struct BoundPlan {
  PyObject_HEAD vectorcallfunc vectorcall;
  ArrayKey like;
  bool known;  // whether the hot path can look at such arrays
  bool in_place;
  PyObject* args[kArgs];  // null but for what is bound
  PyObject *fast, *slow;
};

BoundPlan* plan_of(PyObject* self) { return reinterpret_cast<BoundPlan*>(self); }

// Puts keywords where they belong; false if there are others than those of a plan.
bool place_keywords(PyObject* names, PyObject* const* values, PyObject** all) {
  static const std::array<std::pair<PyObject*, Arg>, 3> known = {{
      {PyUnicode_InternFromString("out"), kOut},
      {PyUnicode_InternFromString("timeout"), kTimeout},
      {PyUnicode_InternFromString("async_op"), kAsync},
  }};
  const Py_ssize_t count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t k = 0; k < count; ++k) {
    bool found = false;
    for (const auto& [name, place] : known) {
      if (PyTuple_GET_ITEM(names, k) != name) continue;
      all[place] = values[k];
      found = true;
    }
    if (!found) return false;
  }
  return true;
}

PyObject* call_plan(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const auto alive = py::reinterpret_borrow<py::object>(self);
    const BoundPlan& plan = *plan_of(self);
    PyObject* all[kArgs];
    std::copy(plan.args, plan.args + kArgs, all);
    all[kOut] = all[kTimeout] = all[kStream] = Py_None;
    all[kAsync] = Py_False;
    if (plan.known && PyVectorcall_NARGS(nargsf) == 1 && place_keywords(keywords, args + 1, all)) {
      all[kX] = args[0];
      if (plan.in_place && all[kOut] == Py_None) all[kOut] = all[kX];
      PyObject* const result = call_fast_or_slow(plan.fast, all, &plan.like);
      if (result != nullptr || PyErr_Occurred() != nullptr) return result;
    }
    if (plan.slow == nullptr) throw py::value_error(kCleared);
    PyObject* const result = PyObject_Vectorcall(plan.slow, args, nargsf, keywords);
    if (result == nullptr) throw py::error_already_set();
    return result;
  });
}

PyObject* create_plan(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 9) throw py::type_error("BoundPlan takes 9 arguments");
    auto* self = plan_of(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    const auto made = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
    const auto owned = [&given](size_t i) { return py::object(given[i]).release().ptr(); };
    self->vectorcall = call_plan;
    self->fast = owned(0);
    self->slow = owned(8);
    ArrayMemory memory;
    new (&self->like) ArrayKey();
    self->known = describe_array(nullptr, given[1].ptr(), false, self->like, memory);
    Py_XINCREF(self->known ? self->like.type : nullptr);
    self->in_place = given[2].cast<bool>();
    int i = 3;
    for (const Arg arg : {kKind, kOp, kRoot, kOrder, kAlgorithm}) self->args[arg] = owned(i++);
    return py::object(made).release().ptr();
  });
}

int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject* object : plan_of(self)->args) Py_VISIT(object);
  Py_VISIT(plan_of(self)->fast);
  Py_VISIT(plan_of(self)->slow);
  return 0;
}

int clear_plan(PyObject* self) {
  Py_CLEAR(plan_of(self)->slow);
  return 0;
}

void destroy_plan(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  clear_plan(self);
  for (PyObject*& object : plan_of(self)->args) Py_CLEAR(object);
  if (plan_of(self)->known) Py_XDECREF(plan_of(self)->like.type);
  Py_CLEAR(plan_of(self)->fast);
  type->tp_free(self);
  Py_DECREF(type);
}

struct Persistent {
  PyObject_HEAD vectorcallfunc vectorcall;
  BoundArrays* bound;  // null: always slow
  PyObject *fast, *keep, *slow;
};

Persistent* persistent(PyObject* self) { return reinterpret_cast<Persistent*>(self); }

PyObject* call_persistent(PyObject* self, PyObject* const*, size_t nargsf, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Persistent& given = *persistent(self);
    if (PyVectorcall_NARGS(nargsf) != 0 ||
        (keywords != nullptr && PyTuple_GET_SIZE(keywords) != 0)) {
      return refuse_call(given.fast, "a plan with out= takes no arguments: it has its arrays");
    }
    const auto alive = py::reinterpret_borrow<py::object>(self);
    if (given.bound != nullptr) {
      PyObject* result = nullptr;
      if (run_bound(given.fast, *given.bound, result)) return result;
    }
    if (given.slow == nullptr) throw py::value_error(kCleared);
    PyObject* const result = PyObject_CallNoArgs(given.slow);
    if (result == nullptr) throw py::error_already_set();
    return result;
  });
}

PyObject* create_persistent(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 7) throw py::type_error("Persistent takes 7 arguments");
    std::unique_ptr<BoundArrays> bound;
    if (!given[1].is_none()) {
      bound = std::make_unique<BoundArrays>();
      bound->call = py::cast<std::shared_ptr<BoundCall>>(given[1]);
      bound->in = reinterpret_cast<char*>(given[2].cast<uintptr_t>());
      bound->out = reinterpret_cast<char*>(given[3].cast<uintptr_t>());
      bound->result = given[4];
    }
    auto* self = persistent(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->vectorcall = call_persistent;
    self->bound = bound.release();
    self->fast = py::object(given[0]).release().ptr();
    self->keep = py::object(given[5]).release().ptr();
    self->slow = py::object(given[6]).release().ptr();
    return reinterpret_cast<PyObject*>(self);
  });
}

int traverse_persistent(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Persistent& given = *persistent(self);
  if (given.bound != nullptr) Py_VISIT(given.bound->result.ptr());
  Py_VISIT(given.fast);
  Py_VISIT(given.keep);
  Py_VISIT(given.slow);
  return 0;
}

int clear_persistent(PyObject* self) {
  delete std::exchange(persistent(self)->bound, nullptr);  // before what its memory belongs to
  Py_CLEAR(persistent(self)->slow);
  Py_CLEAR(persistent(self)->keep);
  return 0;
}

void destroy_persistent(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  clear_persistent(self);
  Py_CLEAR(persistent(self)->fast);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* refuse_copy(PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError,
                  "a plan belongs to its communicator; it cannot be copied or pickled");
  return nullptr;
}

PyMethodDef methods[] = {{"__reduce_ex__", refuse_copy, METH_O, "Refuse to be copied."},
                         {nullptr, nullptr, 0, nullptr}};

// Adds a type whose objects are called by way of the pointer at `vectorcall`.
template <typename Create, typename Destroy, typename Traverse, typename Clear>
void add_callable(py::module_& m, const char* name, int size, Py_ssize_t vectorcall, Create create,
                  Destroy destroy, Traverse traverse, Clear clear) {
  PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, vectorcall, READONLY, nullptr},
                           {nullptr, 0, 0, 0, nullptr}};
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_methods, methods},
                         {Py_tp_members, members},
                         {0, nullptr}};
  PyType_Spec spec = {name, size, 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr(name + sizeof("pycoll._C.") - 1) = type;
}

}  // namespace

void add_plans(py::module_& m) {
  add_callable(m, "pycoll._C.BoundPlan", sizeof(BoundPlan), offsetof(BoundPlan, vectorcall),
               create_plan, destroy_plan, traverse_plan, clear_plan);
  add_callable(m, "pycoll._C.Persistent", sizeof(Persistent), offsetof(Persistent, vectorcall),
               create_persistent, destroy_persistent, traverse_persistent, clear_persistent);
}

}  // namespace pycoll
