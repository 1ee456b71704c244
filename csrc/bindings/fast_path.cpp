#include "bindings/fast_path.h"

#include <array>
#include <limits>
#include <optional>
#include <type_traits>

#include "bindings/arguments.h"
#include "bindings/gil.h"
#include "bindings/python_frame.h"
#include "engine/engine.h"
#include "transports/two_level.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr size_t kSlots = 256;  // direct-mapped
constexpr intptr_t kApart = std::numeric_limits<intptr_t>::min();

// What must be the same for a remembered call to serve again. Objects are compared by identity.
struct Key {
  std::array<PyObject*, 5> objects{};  // kind, op, root, order, algorithm
  ArrayKey x, out;
  intptr_t shift = kApart;  // bytes from x to out where they overlap

  bool operator==(const Key& other) const {
    return same(objects.data(), other.objects.data(), static_cast<int>(objects.size())) &&
           x == other.x && out == other.out && shift == other.shift;
  }
};

struct Entry {
  Key key;
  std::shared_ptr<const BoundCall> call;
  std::shared_ptr<const StagedCall> staged;  // instead of `call`
  std::optional<ArrayKey> fresh;             // the result to allocate
  py::object kept[8];                        // references to what the keys point to

  bool serves(const Key& other) const {
    return (call != nullptr || staged != nullptr) && key == other;
  }
};

struct State {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<MessageEngine> mpi;   // instead of `engine`
  std::shared_ptr<TwoLevelEngine> two;  // likewise
  std::shared_ptr<Heap> heap;
  // Weak references to bound methods.
  py::object slow, site, fail, queued, misused, interrupted;
  py::object in_flight, flight;  // what keeps the arrays of queued calls, and the type for one
  std::array<Entry, kSlots> entries;
  KnownPlaces sites;
};

struct Fastcall {
  PyObject_HEAD State* state;
};

// The arrays of a call, and what keeps them.
struct Arrays {
  ArrayMemory in, out;
  py::object x, result;
};

size_t slot_of(const Key& key) {
  uint64_t h = 0;
  const auto mix = [&h](uint64_t v) { h = (h ^ v) * 0x9E3779B97F4A7C15u; };
  for (const PyObject* object : key.objects) mix(reinterpret_cast<uintptr_t>(object));
  mix(reinterpret_cast<uintptr_t>(key.x.type) + key.x.element);
  for (int i = 0; i < key.x.ndim; ++i) mix(static_cast<uint64_t>(key.x.dims[i]));
  mix(static_cast<uint64_t>(key.x.place) << 4 | static_cast<uint64_t>(key.out.place));
  mix(static_cast<uint64_t>(key.shift));
  return h >> 56;
}

bool make_key(const State& state, PyObject* const* args, Key& key, Arrays& arrays) {
  key.objects = {args[kKind], args[kOp], args[kRoot], args[kOrder], args[kAlgorithm]};
  auto& [in, out, x, result] = arrays;
  const bool in_place = args[kX] == args[kOut];
  if (!describe_array(state.heap.get(), args[kX], in_place, key.x, in)) return false;
  if (in_place) {
    key.out = key.x;
    out = in;
  } else if (!describe_array(state.heap.get(), args[kOut], true, key.out, out)) {
    return false;
  }
  const bool apart = in.data == nullptr || out.data == nullptr || in.scattered ||
                     in.data + in.nbytes <= out.data || out.data + out.nbytes <= in.data;
  if (!apart) key.shift = out.data - in.data;
  return true;
}

// Calls what a hook gives, in place of the engine's part of a call or before it. Peers hear of an
// interrupt there: they would take the next call of this rank for this one.
[[gnu::noinline]] py::object in_python(State& state, const py::object& hook,
                                       PyObject* const* args = nullptr, size_t nargs = 0) {
  try {
    PyObject* const result = PyObject_Vectorcall(hook().ptr(), args, nargs, nullptr);
    if (result != nullptr) return py::reinterpret_steal<py::object>(result);
    throw py::error_already_set();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      try {
        state.interrupted()(error.type().attr("__name__"));
      } catch (py::error_already_set&) {  // the interrupt is what the user gets
      }
    }
    throw;
  }
}

// The id of the line that called the communicator's method: the innermost Python frame.
uint32_t call_site(State& state) {
  const CodePlace place = innermost_place();
  if (!place.code) return 0;
  KnownPlace& known = state.sites[place];
  if (!known.is(place)) known = {place, in_python(state, state.site).cast<uint32_t>()};
  return known.number;
}

// Raises the exception for an engine error; a pending one, of an interrupt, stays. Where MPI may
// still look at the arrays, they are never let go.
void fail(State& state, const std::string& kind, const std::string& text, PyObject* x,
          const py::object& result) {
  const bool lasting =
      state.two != nullptr ? kind != "PeerRejected" : state.mpi != nullptr && state.mpi->failed();
  if (lasting) {
    Py_INCREF(x);
    result.inc_ref();
  }
  if (PyErr_Occurred() == nullptr) {
    state.fail()(kind, text);
  } else if (state.two != nullptr) {  // the other level must hear of it
    const py::error_scope kept;
    try {
      state.fail()(kind, text);
    } catch (py::error_already_set&) {  // the interrupt is what the user gets
    }
  }
}

// Makes what the call needs besides the user's arrays: a contiguous input, and a result. False if
// there is no memory for them, or if they lie elsewhere than in the call that is remembered. May
// run Python code.
bool complete(const State& state, PyObject* const* args, const Key& key,
              const std::optional<ArrayKey> fresh, Arrays& arrays) {
  auto& [in, out, x, result] = arrays;
  x = py::reinterpret_borrow<py::object>(args[kX]);
  result = py::reinterpret_borrow<py::object>(args[kOut]);
  try {
    ArrayKey made;
    if (in.scattered) {
      x = packed(args[kX], key.x);
      if (!describe_array(state.heap.get(), x.ptr(), false, made, in) || made != key.x)
        return false;
    }
    if (!fresh) return true;
    result = new_array(*fresh, args[kX]);
    made = {};
    if (!describe_array(state.heap.get(), result.ptr(), true, made, out)) return false;
    if (key.x.place == Place::kPrivate) made.place = fresh->place;  // it does not matter where
    return made == *fresh;
  } catch (const py::error_already_set&) {  // no memory: the slow path lets the peers know
    return false;
  }
}

// What keeps the arrays of a call that is about to be queued. It is made without Python code, where
// an interrupt could be raised.
py::object take_off(const State& state, const Arrays& arrays) {
  static PyObject* const keep = PyUnicode_InternFromString("keep");
  static PyObject* const result = PyUnicode_InternFromString("result");
  static PyObject* const append = PyUnicode_InternFromString("append");
  py::object flight = state.flight();
  py::setattr(flight, keep, arrays.x);
  py::setattr(flight, result, arrays.result);
  const auto appended = py::reinterpret_steal<py::object>(
      PyObject_CallMethodOneArg(state.in_flight.ptr(), append, flight.ptr()));
  if (!appended) throw py::error_already_set();
  return flight;
}

// Puts the call in the engine's queue; Python makes a `Work` of it. An interrupt is raised by the
// first Python code that runs after this began: then the call is queued, and its arrays are kept.
PyObject* submit(State& state, const Entry& entry, Arrays& arrays, uint32_t site, double limit_s) {
  const std::shared_ptr<const BoundCall> call = entry.call;
  const std::shared_ptr<Engine> engine = state.engine;  // another thread may close it meanwhile
  const std::shared_ptr<MessageEngine> mpi = state.mpi;
  static PyObject* const place = PyUnicode_InternFromString("ticket");
  const auto& [in, out, x, result] = arrays;
  const py::object flight = take_off(state, arrays);
  uint64_t ticket = 0;
  try {
    const Unlocked unlocked;
    ticket = engine != nullptr ? engine->submit(call, in.data, out.data, site, limit_s)
                               : mpi->submit(call, in.data, out.data, site, limit_s);
  } catch (const Error& error) {
    flight.attr("ended") = true;
    fail(state, error.kind(), error.what(), x.ptr(), result);
    return nullptr;
  } catch (...) {
    flight.attr("ended") = true;
    throw;
  }
  py::setattr(flight, place, py::int_(ticket));
  return state.queued()(flight).release().ptr();
}

// Runs a call on an engine, which another thread may close meanwhile.
template <typename E, typename Call>
PyObject* run_on(State& state, const std::shared_ptr<E> engine, const std::shared_ptr<Call> call,
                 Arrays& arrays, uint32_t site, double limit_s) {
  auto& [in, out, x, result] = arrays;
  const auto work = [&, in = in.data, out = out.data] {
    engine->run(*call, in, out, site, limit_s);
  };
  const std::optional<Error> error = [&] {
    if constexpr (std::is_same_v<E, TwoLevelEngine>) {
      return error_of<Unlocked>(work);
    } else {
      return error_of_call(engine.get(), call.get(), work);
    }
  }();
  if (!error.has_value()) return result.release().ptr();
  fail(state, error->kind(), error->what(), x.ptr(), result);
  return nullptr;
}

PyObject* run(State& state, const Entry& entry, Arrays& arrays, uint32_t site, double limit_s) {
  if (state.engine != nullptr)
    return run_on(state, state.engine, entry.call, arrays, site, limit_s);
  if (state.two != nullptr) return run_on(state, state.two, entry.staged, arrays, site, limit_s);
  return run_on(state, state.mpi, entry.call, arrays, site, limit_s);
}

PyObject* fast_or_slow(State& state, PyObject* const* args, const ArrayKey* like) {
  Key key;
  Arrays arrays;
  const bool now = args[kAsync] == Py_False;
  const std::optional<double> limit_s = limit_of(args[kTimeout]);
  const bool plain = limit_s && args[kStream] == Py_None &&
                     (now || (args[kAsync] == Py_True && state.two == nullptr));
  // A new place in the program is asked for by Python code, and whatever runs in between, such as a
  // signal handler, may use or close this communicator. So nothing is looked at before that.
  const uint32_t site = plain ? call_site(state) : 0;
  if (plain && make_key(state, args, key, arrays) && (like == nullptr || like->is_like(key.x))) {
    const Entry& entry = state.entries[slot_of(key)];
    if (entry.serves(key) && (state.two == nullptr || state.two->idle()) &&
        complete(state, args, key, entry.fresh, arrays) && entry.serves(key)) {
      return (now ? run : submit)(state, entry, arrays, site, *limit_s);
    }
  }
  return like != nullptr ? nullptr : in_python(state, state.slow, args, kArgs).release().ptr();
}

PyObject* remember(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 9) throw py::type_error("remember takes 9 arguments");
    State& state = *reinterpret_cast<Fastcall*>(self)->state;
    PyObject* all[kArgs] = {args[1], args[2], args[3], args[4], args[5], args[6], args[7]};
    Key key;
    Arrays arrays;
    if (!make_key(state, all, key, arrays)) Py_RETURN_NONE;
    Entry entry;
    entry.key = key;
    if (state.two != nullptr) {
      entry.staged = py::cast<std::shared_ptr<StagedCall>>(py::handle(args[0]));
    } else {
      entry.call = py::cast<std::shared_ptr<BoundCall>>(py::handle(args[0]));
    }
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
    const bool closed = state.engine == nullptr && state.mpi == nullptr && state.two == nullptr;
    if (!closed) state.entries[slot_of(key)] = std::move(entry);  // by another thread, meanwhile
    Py_RETURN_NONE;
  });
}

PyObject* forget(PyObject* self, PyObject*) {
  State& state = *reinterpret_cast<Fastcall*>(self)->state;
  for (Entry& entry : state.entries) entry = Entry();
  state.engine.reset();
  state.mpi.reset();
  state.two.reset();
  state.heap.reset();
  Py_RETURN_NONE;
}

PyObject* create_fastcall(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 10) throw py::type_error("Fastcall takes 10 arguments");
    auto state = std::make_unique<State>();
    if (py::isinstance<TwoLevelEngine>(given[0])) {
      state->two = given[0].cast<std::shared_ptr<TwoLevelEngine>>();
    } else if (py::isinstance<MessageEngine>(given[0])) {
      state->mpi = given[0].cast<std::shared_ptr<MessageEngine>>();
    } else {
      state->engine = given[0].cast<std::shared_ptr<Engine>>();
    }
    state->heap = given[1].cast<std::shared_ptr<Heap>>();
    state->slow = given[2];
    state->site = given[3];
    state->fail = given[4];
    state->queued = given[5];
    state->misused = given[6];
    state->interrupted = given[7];
    state->in_flight = given[8];
    state->flight = given[9];
    auto* self = reinterpret_cast<Fastcall*>(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->state = state.release();
    return reinterpret_cast<PyObject*>(self);
  });
}

// An algorithm of the user that is kept here may refer to the communicator, and so to this object.
int traverse_fastcall(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const State* state = reinterpret_cast<Fastcall*>(self)->state;
  if (state == nullptr) return 0;
  Py_VISIT(state->in_flight.ptr());
  for (const Entry& entry : state->entries) {
    for (const py::object& object : entry.kept) Py_VISIT(object.ptr());
  }
  return 0;
}

int clear_fastcall(PyObject* self) {
  State* state = reinterpret_cast<Fastcall*>(self)->state;
  if (state == nullptr) return 0;
  for (Entry& entry : state->entries) entry = Entry();
  return 0;
}

void destroy_fastcall(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Fastcall*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

State& state_of(PyObject* fastcall) {
  if (Py_TYPE(fastcall)->tp_dealloc != destroy_fastcall) throw py::type_error("not a Fastcall");
  return *reinterpret_cast<Fastcall*>(fastcall)->state;
}

}  // namespace

PyObject* call_fast_or_slow(PyObject* fastcall, PyObject* const* args, const ArrayKey* like) {
  return fast_or_slow(state_of(fastcall), args, like);
}

bool run_bound(PyObject* fastcall, const BoundArrays& bound, PyObject*& result) {
  State& state = state_of(fastcall);
  const uint32_t site = state.engine != nullptr ? call_site(state) : 0;
  if (state.engine == nullptr) return false;
  Arrays arrays{{.data = bound.in}, {.data = bound.out}, {}, bound.result};
  result = run_on(state, state.engine, bound.call, arrays, site, Engine::kDefaultTimeout);
  return true;
}

PyObject* refuse_call(PyObject* fastcall, const char* text) {
  return state_of(fastcall).misused()(text).release().ptr();
}

void add_fastcall(py::module_& m) {
  static PyMethodDef methods[] = {
      {"remember", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(remember)),
       METH_FASTCALL, "Serve calls like this one on the hot path."},
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
