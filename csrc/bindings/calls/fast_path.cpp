#include "bindings/calls/fast_path.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "bindings/bindings.h"
#include "bindings/calls/registered_calls.h"
#include "bindings/calls/remembered_calls.h"

namespace py = pybind11;
namespace pycoll {

size_t set_of(const CallKey& key) {
  uint64_t h = 0;
  const auto mix = [&h](uint64_t v) { h = (h ^ v) * 0x9E3779B97F4A7C15u; };
  for (const PyObject* object : key.objects) mix(reinterpret_cast<uintptr_t>(object));
  mix(reinterpret_cast<uintptr_t>(key.x.type) + key.x.element);
  for (int i = 0; i < key.x.ndim; ++i) mix(static_cast<uint64_t>(key.x.dims[i]));
  mix(static_cast<uint64_t>(key.x.place) << 4 | static_cast<uint64_t>(key.out.place));
  mix(static_cast<uint64_t>(key.shift));
  return h >> 56;
}

bool make_key(const FastcallState& state, PyObject* const* args, CallKey& key, CallArrays& arrays) {
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

void tell_of_interrupt(const FastcallState& state, py::error_already_set& error) {
  try {
    session_of(state).attr("_interrupted")(error.type().attr("__name__"));
  } catch (py::error_already_set&) {  // the interrupt is what the user gets
  }
}

void tell_of_error(const FastcallState& state, const py::error_already_set& error) {
  if (error.matches(PyExc_Exception)) session_of(state).attr("refused")(error.value());
}

namespace {

// Calls a method of the session, in place of the engine's part of a call or before it.
[[gnu::noinline]] py::object in_python(FastcallState& state, const char* method,
                                       PyObject* const* args = nullptr, size_t nargs = 0) {
  try {
    const py::object bound = session_of(state).attr(method);
    PyObject* const result = PyObject_Vectorcall(bound.ptr(), args, nargs, nullptr);
    if (result != nullptr) return py::reinterpret_steal<py::object>(result);
    throw py::error_already_set();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) tell_of_interrupt(state, error);
    throw;
  }
}

}  // namespace

uint32_t call_site(FastcallState& state) {
  const CodePlace place = innermost_place();
  if (!place.code) return 0;
  KnownPlace& known = state.sites[place];
  if (!known.is(place)) known = {place, in_python(state, "site").cast<uint32_t>()};
  return known.number;
}

namespace {

// Raises the exception for an engine error; a pending one, of an interrupt, stays. Where MPI may
// still look at the arrays, they are never let go.
void fail(FastcallState& state, const std::string& kind, const std::string& text, PyObject* x,
          const py::object& result) {
  const bool lasting =
      state.two != nullptr ? kind != "PeerRejected" : state.mpi != nullptr && state.mpi->failed();
  if (lasting) {
    Py_INCREF(x);
    result.inc_ref();
  }
  if (PyErr_Occurred() == nullptr) {
    session_of(state).attr("_fail")(kind, text);
  } else if (state.two != nullptr) {  // the other level must hear of it
    const py::error_scope kept;
    try {
      session_of(state).attr("_fail")(kind, text);
    } catch (py::error_already_set&) {  // the interrupt is what the user gets
    }
  }
}

// Makes what the call needs besides the user's arrays: a contiguous input, and a result. False if
// there is no memory for them, or if they lie elsewhere than in the call that is remembered. May
// run Python code.
bool complete(const FastcallState& state, PyObject* const* args, const CallKey& key,
              const std::optional<ArrayKey> fresh, CallArrays& arrays) {
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
  } catch (py::error_already_set& error) {  // no memory: the slow path lets the peers know
    if (error.matches(PyExc_Exception)) return false;
    tell_of_interrupt(state, error);
    throw;
  }
}

// What keeps the arrays of a call that is about to be queued. It is made without Python code, where
// an interrupt could be raised.
py::object take_off(const FastcallState& state, const CallArrays& arrays) {
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
PyObject* submit(FastcallState& state, const RememberedCall& entry, CallArrays& arrays,
                 uint32_t site, double limit_s) {
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
  static PyObject* const queued = PyUnicode_InternFromString("_queued");
  return PyObject_CallMethodOneArg(session_of(state).ptr(), queued, flight.ptr());
}

// Runs a call on an engine, which another thread may close meanwhile. `detours` is for an Engine.
template <typename E, typename Call, typename... Around>
PyObject* run_on(FastcallState& state, E* engine, Call* call, CallArrays& arrays, uint32_t site,
                 double limit_s, Around&&... detours) {
  auto& [in, out, x, result] = arrays;
  const auto work = [&, in = in.data, out = out.data] {
    engine->run(*call, in, out, site, limit_s, std::forward<Around>(detours)...);
  };
  const std::optional<Error> error = [&] {
    const RunningCall running(state);
    if constexpr (std::is_same_v<E, TwoLevelEngine>) {
      return error_of<Unlocked>(work);
    } else {
      return error_of_call(engine, call, work);
    }
  }();
  if (!error.has_value()) return result.release().ptr();
  fail(state, error->kind(), error->what(), x.ptr(), result);
  return nullptr;
}

}  // namespace

PyObject* run(FastcallState& state, const RunnableCall& runs, CallArrays& arrays, uint32_t site,
              double limit_s, std::shared_ptr<const Detours> detours) {
  const BoundCall* const call = runs.call.get();
  if (state.engine != nullptr) {
    Engine* const engine = state.engine.get();
    return run_on(state, engine, call, arrays, site, limit_s, std::move(detours));
  }
  if (state.mpi != nullptr) return run_on(state, state.mpi.get(), call, arrays, site, limit_s);
  return run_on(state, state.two.get(), runs.staged.get(), arrays, site, limit_s);
}

namespace {

bool is_numpy_number(const FastcallState& state, PyObject* x) {
  for (const py::object& base : {state.number, state.boolean}) {
    const auto type = reinterpret_cast<PyTypeObject*>(base.ptr());
    if (PyType_IsSubtype(Py_TYPE(x), type) != 0) return true;
  }
  return false;
}

// Whether a list is one of numbers of Python's, all of which NumPy makes an array of as they are:
// it would round an int that int64 cannot hold.
bool is_plain_list(PyObject* x) {
  if (!PyList_CheckExact(x) && !PyTuple_CheckExact(x)) return false;
  PyObject* const* items = PySequence_Fast_ITEMS(x);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(x);
  return count > 0 && std::all_of(items, items + count, [](PyObject* item) {
           int overflow = 0;
           if (PyLong_CheckExact(item)) PyLong_AsLongLongAndOverflow(item, &overflow);
           return overflow == 0 && (is_python_number(item) || PyFloat_Check(item));
         });
}

// The array that stands for a number, of Python's or of NumPy's, or for a list of them, or that
// lies in memory of Python's; null for anything else, and for what needs Python code.
py::object array_of_numbers(const FastcallState& state, PyObject* x) {
  if (is_python_number(x)) return array_of_python_number(x);
  if (is_plain_list(x) || is_numpy_number(state, x)) return py::array::ensure(py::handle(x));
  if (!is_buffer(x)) return {};
  const auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(x));
  if (!view) PyErr_Clear();  // it has been released
  return view ? py::array::ensure(view) : py::object();
}

// The call like this one that is remembered, or null. What is there may be replaced as soon as
// Python code runs.
[[gnu::always_inline]] inline const RememberedCall* find_call(const FastcallState& state,
                                                              const CallKey& key) {
  const CallSet* const set = state.sets[set_of(key)].get();
  if (set == nullptr) return nullptr;
  for (const RememberedCall& entry : set->ways) {
    if (entry.serves(key)) return &entry;
  }
  return nullptr;
}

// Fills a result that no rank contributes to: the engine has no part in it.
void fill(const std::string& element, ArrayMemory& out) {
  const uint64_t size = element.size();
  if (out.nbytes >= size) std::memcpy(out.data, element.data(), size);
  for (uint64_t done = size; done < out.nbytes; done *= 2) {
    std::memcpy(out.data + done, out.data, std::min(done, out.nbytes - done));
  }
  out.data = nullptr;
}

// Runs a call on the engine, if its like is remembered, or by Python code with `slow_args`, where
// a number is no array yet.
PyObject* fast_or_slow(FastcallState& state, PyObject* const* args, const ArrayKey* like,
                       PyObject* const* slow_args) {
  CallKey key;
  CallArrays arrays;
  const bool now = args[kAsync] == Py_False;
  const std::optional<double> limit_s = limit_of(args[kTimeout]);
  const bool plain = limit_s && args[kStream] == Py_None &&
                     (now || (args[kAsync] == Py_True && state.two == nullptr));
  // A new place in the program is asked for by Python code, and whatever runs in between, such as a
  // signal handler, may use or close this communicator. So nothing is looked at before that.
  const uint32_t site = plain ? call_site(state) : 0;
  if (plain && make_key(state, args, key, arrays) && (like == nullptr || like->is_like(key.x))) {
    const RememberedCall* entry = find_call(state, key);
    if (entry == nullptr && unify_dtypes(state, key)) entry = find_call(state, key);
    if (entry != nullptr && (state.two == nullptr || state.two->idle()) &&
        complete(state, args, key, entry->fresh, arrays) && entry->serves(key)) {
      if (!entry->neutral.empty()) fill(entry->neutral, arrays.out);
      if (!has_registered(key)) [[likely]]
        return now ? run(state, *entry, arrays, site, *limit_s)
                   : submit(state, *entry, arrays, site, *limit_s);
      PyObject* const result =
          now ? run_registered(state, *entry, arrays, site, *limit_s) : nullptr;
      if (result != nullptr || PyErr_Occurred() != nullptr) return result;
    }
  }
  if (like != nullptr) return nullptr;
  return in_python(state, "call", slow_args, kArgs).release().ptr();
}

// A call without `out` on what is no array of NumPy.
[[gnu::noinline]] PyObject* on_numbers(FastcallState& state, PyObject* const* args) {
  const py::object array = array_of_numbers(state, args[kX]);
  if (!array) return fast_or_slow(state, args, nullptr, args);
  std::array<PyObject*, kArgs> with_array;
  std::copy(args, args + kArgs, with_array.begin());
  with_array[kX] = array.ptr();
  PyObject* const result = fast_or_slow(state, with_array.data(), nullptr, args);
  const bool single = is_python_number(args[kX]) || is_numpy_number(state, args[kX]);
  return single ? number_of(result) : result;
}

}  // namespace

PyObject* call_fast_or_slow(PyObject* fastcall, PyObject* const* args, const ArrayKey* like) {
  FastcallState& state = state_of(fastcall);
  std::array<PyObject*, kArgs> with_root;
  py::object root;
  if (!PyLong_CheckExact(args[kRoot]) && is_numpy_number(state, args[kRoot])) [[unlikely]] {
    root = py::reinterpret_steal<py::object>(PyNumber_Index(args[kRoot]));
    if (!root) PyErr_Clear();  // it is no integer, of which Python code tells
    std::copy(args, args + kArgs, with_root.begin());
    if (root) with_root[kRoot] = root.ptr();
    args = with_root.data();
  }
  PyObject* const x = args[kX];
  const bool fresh = args[kOut] == Py_None && like == nullptr && args[kAsync] == Py_False;
  if (fresh && x != Py_None && Py_TYPE(x) != py::detail::npy_api::get().PyArray_Type_) {
    return on_numbers(state, args);
  }
  return fast_or_slow(state, args, like, args);
}

bool run_bound(PyObject* fastcall, const BoundArrays& bound, PyObject*& result) {
  FastcallState& state = state_of(fastcall);
  const uint32_t site = state.engine != nullptr ? call_site(state) : 0;
  if (state.engine == nullptr) return false;
  const HoldOf in(state.heap.get(), bound.in, bound.call->in_bytes);
  const HoldOf out(state.heap.get(), bound.out, bound.call->out_bytes);
  CallArrays arrays{{.data = bound.in}, {.data = bound.out}, {}, bound.result};
  result =
      run_on(state, state.engine.get(), bound.call.get(), arrays, site, Engine::kDefaultTimeout);
  return true;
}

PyObject* refuse_call(PyObject* fastcall, const char* text) {
  return session_of(state_of(fastcall)).attr("misused")(text).release().ptr();
}

}  // namespace pycoll
