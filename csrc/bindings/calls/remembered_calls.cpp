#include "bindings/calls/remembered_calls.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/calls/fast_path.h"
#include "bindings/calls/object_calls.h"
#include "bindings/calls/registered_calls.h"
#include "bindings/calls/sized_calls.h"

namespace py = pybind11;
namespace pycoll {

namespace {

// Puts something in the place of what is remembered.
void replace(FastcallState& state, RememberedCall& old, RememberedCall entry = {}) {
  if (state.running > 0) {
    if (old.call != nullptr) state.gone.push_back(old.call);
    if (old.staged != nullptr) state.gone.push_back(old.staged);
  }
  old = std::move(entry);
}

// Where a call is to be remembered.
RememberedCall& place_for(FastcallState& state, const CallKey& key) {
  std::unique_ptr<CallSet>& found = state.sets[set_of(key)];
  if (found == nullptr) found = std::make_unique<CallSet>();
  auto& [ways, next] = *found;
  const auto same = std::find_if(ways.begin(), ways.end(),
                                 [&](const RememberedCall& old) { return old.serves(key); });
  if (same != ways.end()) return *same;
  const auto unused = std::find_if(ways.begin(), ways.end(), [](const RememberedCall& old) {
    return old.call == nullptr && old.staged == nullptr;
  });
  return unused != ways.end() ? *unused : ways[next++ % kWays];
}

constexpr Py_ssize_t kMostDtypes = 256;

// Dates and records may be equal and yet differ in name, for which ranks would be told apart.
bool may_unify(PyObject* type) {
  if (!py::isinstance<py::dtype>(type)) return false;
  const char kind = py::reinterpret_borrow<py::dtype>(type).kind();
  return kind != 'm' && kind != 'M' && kind != 'V';
}

void note_dtype(FastcallState& state, PyObject* type) {
  if (type == nullptr || !may_unify(type)) return;
  if (PyDict_Size(state.dtypes.ptr()) >= kMostDtypes) state.dtypes.clear();
  if (PyDict_SetDefault(state.dtypes.ptr(), type, type) == nullptr) throw py::error_already_set();
}

void forget_calls(FastcallState& state) {
  for (const std::unique_ptr<CallSet>& set : state.sets) {
    if (set == nullptr) continue;
    for (RememberedCall& entry : set->ways) replace(state, entry);
  }
}

bool is_open(const FastcallState& state) {
  return state.engine != nullptr || state.mpi != nullptr || state.two != nullptr;
}

template <typename E>
void let_go(FastcallState& state, std::shared_ptr<E>& engine) {
  if (state.running > 0 && engine != nullptr) state.gone.push_back(engine);
  engine.reset();
}

// Whether peers reach the arrays of a call where its plan needs that. If another thread has
// unregistered one since the call was prepared, it would be remembered for ordinary arrays.
bool is_within_reach(const RememberedCall& entry) {
  if (entry.call == nullptr || !entry.call->plan->direct || entry.call->across) return true;
  const Place out = entry.fresh ? entry.fresh->place : entry.key.out.place;
  return entry.key.x.place != Place::kPrivate && (entry.call->input_only || out != Place::kPrivate);
}

PyObject* remember(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 10) throw py::type_error("remember takes 10 arguments");
    FastcallState& state = *reinterpret_cast<Fastcall*>(self)->state;
    PyObject* all[kArgs] = {args[1], args[2], args[3], args[4], args[5], args[6], args[7]};
    CallKey key;
    CallArrays arrays;
    if (!make_key(state, all, key, arrays)) Py_RETURN_NONE;
    RememberedCall entry;
    if (args[9] != Py_None) entry.neutral = py::handle(args[9]).cast<std::string>();
    if (!entry.neutral.empty() && has_registered(key)) Py_RETURN_NONE;
    for (PyObject* dtype : {key.x.type, key.out.type}) note_dtype(state, dtype);
    unify_dtypes(state, key);
    entry.key = key;
    static_cast<RunnableCall&>(entry) = runnable(state, args[0]);
    for (size_t i = 0; i < key.objects.size(); ++i) {
      entry.kept[i] = py::reinterpret_borrow<py::object>(key.objects[i]);
    }
    if (args[8] != Py_None) {
      ArrayMemory memory;
      if (!describe_array(state.heap.get(), args[8], true, entry.fresh.emplace(), memory)) {
        Py_RETURN_NONE;
      }
      entry.kept[7] = py::reinterpret_borrow<py::object>(entry.fresh->type);
    }
    entry.kept[5] = py::reinterpret_borrow<py::object>(key.x.type);
    entry.kept[6] = py::reinterpret_borrow<py::object>(key.out.type);
    if (!is_open(state) || !is_within_reach(entry)) Py_RETURN_NONE;
    replace(state, place_for(state, key), std::move(entry));
    Py_RETURN_NONE;
  });
}

PyObject* forget(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    FastcallState& state = *reinterpret_cast<Fastcall*>(self)->state;
    forget_calls(state);
    state.sized.clear();
    state.objects.clear();
    let_go(state, state.engine);
    let_go(state, state.mpi);
    let_go(state, state.two);
    state.heap.reset();
    state.messages = {};
    Py_RETURN_NONE;
  });
}

PyObject* create_fastcall(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 6) throw py::type_error("Fastcall takes 6 arguments");
    auto state = std::make_unique<FastcallState>();
    if (py::isinstance<TwoLevelEngine>(given[0])) {
      state->two = given[0].cast<std::shared_ptr<TwoLevelEngine>>();
    } else if (py::isinstance<MessageEngine>(given[0])) {
      state->mpi = given[0].cast<std::shared_ptr<MessageEngine>>();
    } else {
      state->engine = given[0].cast<std::shared_ptr<Engine>>();
    }
    state->heap = given[1].cast<std::shared_ptr<Heap>>();
    state->session = given[2];
    state->freed = given[3];
    state->in_flight = given[4];
    state->flight = given[5];
    const auto numpy = py::module_::import("numpy");
    state->number = numpy.attr("number");
    state->boolean = numpy.attr("bool_");
    auto* self = reinterpret_cast<Fastcall*>(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->state = state.release();
    return reinterpret_cast<PyObject*>(self);
  });
}

// An algorithm of the user that is kept here may refer to the communicator, and so to this object.
int traverse_fastcall(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const FastcallState* state = reinterpret_cast<Fastcall*>(self)->state;
  if (state == nullptr) return 0;
  Py_VISIT(state->in_flight.ptr());
  for (const std::unique_ptr<CallSet>& set : state->sets) {
    if (set == nullptr) continue;
    for (const RememberedCall& entry : set->ways) {
      for (const py::object& object : entry.kept) Py_VISIT(object.ptr());
    }
  }
  return 0;
}

int clear_fastcall(PyObject* self) {
  FastcallState* state = reinterpret_cast<Fastcall*>(self)->state;
  if (state == nullptr) return 0;
  forget_calls(*state);
  state->sized.clear();
  state->objects.clear();
  return 0;
}

void destroy_fastcall(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Fastcall*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

bool unify_dtypes(const FastcallState& state, CallKey& key) {
  bool any = false;
  for (ArrayKey* array : {&key.x, &key.out}) {
    if (array->type == nullptr || array->element != 0 || !may_unify(array->type)) continue;
    PyObject* const known = PyDict_GetItemWithError(state.dtypes.ptr(), array->type);
    if (known == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (known == nullptr || known == array->type) continue;
    array->type = known;
    any = true;
  }
  return any;
}

FastcallState& state_of(PyObject* fastcall) {
  if (Py_TYPE(fastcall)->tp_dealloc != destroy_fastcall) throw py::type_error("not a Fastcall");
  return *reinterpret_cast<Fastcall*>(fastcall)->state;
}

py::object session_of(const FastcallState& state) {
  py::object session = state.session();
  if (!session.is_none()) return session;
  state.freed();
  throw py::type_error("the session is no more");
}

RunnableCall runnable(const FastcallState& state, py::handle call) {
  RunnableCall found;
  if (state.two != nullptr) {
    found.staged = py::cast<std::shared_ptr<StagedCall>>(call);
  } else {
    found.call = py::cast<std::shared_ptr<BoundCall>>(call);
  }
  return found;
}

bool can_run(const FastcallState& state) {
  return is_open(state) && (state.two == nullptr || state.two->idle());
}

void add_fastcall(py::module_& m) {
  static PyMethodDef methods[] = {
      {"remember", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(remember)),
       METH_FASTCALL, "Serve calls like this one on the hot path."},
      {"on_bytes", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_on_bytes)),
       METH_FASTCALL, "Run a call on bytes; return those that it gives."},
      {"use_messages", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(use_messages)),
       METH_FASTCALL, "Serve messages of plain arrays without Python code."},
      {"remember_sized",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(remember_sized)), METH_FASTCALL,
       "Serve v-variants like this one without Python code."},
      {"remember_object",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(remember_object)), METH_FASTCALL,
       "Serve calls on Python objects like this one without Python code."},
      {"run_sized", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_sized)),
       METH_FASTCALL, "Run a v-variant like an earlier one."},
      {"forget", forget, METH_NOARGS, "Let go of the engine; every call takes the slow path."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create_fastcall)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy_fastcall)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_fastcall)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_fastcall)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycoll._C.Fastcall", sizeof(Fastcall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr("Fastcall") = type;
}

}  // namespace pycoll
