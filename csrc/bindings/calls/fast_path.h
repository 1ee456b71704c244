// The hot path from Python: from a method of the communicator to the engine, without Python code.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/calls/arguments.h"
#include "engine/bind.h"

namespace pycoll {

// The arguments of any collective, in the order in which they are passed around.
enum Arg {
  kKind,
  kX,
  kOut,
  kOp,
  kRoot,
  kOrder,
  kAlgorithm,
  kTimeout,
  kAsync,
  kStream,
};
inline constexpr Py_ssize_t kArgs = 10;

// Adds the type `Fastcall`, one object of which belongs to every communicator. Its engine is an
// Engine with a Heap, or an MessageEngine or a TwoLevelEngine with None.
//
//   fast = Fastcall(engine, heap, session, freed, in_flight, flight)
//   fast.remember(bound_or_staged_call, kind, x, out, op, root, order, algorithm, result, neutral)
//   fast.forget()
//
// A call whose arrays, see arguments.h, are of shapes, dtypes and kinds of memory that were
// remembered, with all other arguments but the timeout being the very objects that were remembered,
// goes straight to the engine. `result` is an array like the one to allocate for the result, or
// None; `neutral` the bytes of an element to fill it with, where no rank contributes to it, or
// None. `session` is a weak reference; where there is none any more, freed() raises what the caller
// gets. All else is done by methods of the session: call(...) runs any other call, with all kArgs
// arguments, site() returns the id of the call site (asked once per place in the program),
// _fail(kind, text) raises the exception for an engine error, _queued(kept) returns what a call
// with async_op returns, misused(text) raises TypeError and lets peers know, refused(error) and
// _interrupted(name) let them know that an exception, or an interrupt of that name, has ended a
// call before the engine had it.
//
// `kept` is an object of the type `flight`, which takes no arguments, with the attributes `keep`
// and `result`, the arrays of the call, and `ticket`. It is in `in_flight`, a deque, before the
// call is in the queue of the engine; it is marked `ended` if the engine does not take the call.
void add_fastcall(pybind11::module_& m);

// Runs one call through a Fastcall object. Throws pybind11 exceptions or returns null with a Python
// error set. With `like` it runs calls on such inputs only, and no others but on the hot path:
// else it does nothing, and returns null without an error.
PyObject* call_fast_or_slow(PyObject* fastcall, PyObject* const* args,
                            const ArrayKey* like = nullptr);

// A call with its arrays, and what it returns.
struct BoundArrays {
  std::shared_ptr<const BoundCall> call;
  char *in, *out;
  pybind11::object result;
};

// Runs a call on arrays that it keeps; false if the communicator is closed. The result is null with
// a Python error set if the call has failed; it may throw pybind11 exceptions.
bool run_bound(PyObject* fastcall, const BoundArrays& bound, PyObject*& result);

// For a call whose arguments do not fit its signature. Returns null with a Python error set.
PyObject* refuse_call(PyObject* fastcall, const char* text);

// Adds the type `Caller`, from which objects with such methods derive. They have an attribute
// `_fast`, a Fastcall; once that is deleted, methods call their `_closed()`, which raises.
void add_caller(pybind11::module_& m);

// Adds the type `Method`: a method of a `Caller` whose signature and text are those of a Python
// function, and whose body is call_fast_or_slow on the attribute `_fast`, or call_message or
// call_sized.
//
//   Method(kind, names, positional, defaults, in_place, function)
//
// names: parameter name of each Arg, or None where the method has no such parameter; positional:
// the Args that may be given by position, in order; defaults: a value for each Arg, or the name
// itself where it must be given; in_place: where `out` is None it is `x`; function: None, or of
// messages and v-variants what serves calls that are not usual: then the Args are MessageArgs, and
// `kind` is a MessageCall as an int, or they are SizedArgs.
void add_method(pybind11::module_& m);

// Adds the types `BoundPlan` and `Persistent`; plans.cpp.
void add_plans(pybind11::module_& m);

// Runs f; C++ and Python exceptions become the Python error indicator, and null is returned.
template <typename F>
PyObject* guarded(F&& f) {
  try {
    return f();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace pycoll
