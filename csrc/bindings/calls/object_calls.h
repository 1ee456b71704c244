// Calls on small Python objects, from a method of the communicator to the engine. A method of
// `Fastcall`, see fast_path.h:
//
//   fast.remember_object(kind, root, call, room, rows, sends, reads, functions)
//
// lets the extension serve calls of this kind and root. `call` moves the first `room` bytes of an
// object: its size, the root, and what there is room for of the object as bytes. It gives `rows` of
// these, or 0: that of the root alone. This rank sends an object, and reads those that come, or
// not. The functions are
//
//   pack(x, pickle)                                 an object as bytes
//   unpack(data, pickle, sender)                    and back
//   rest(session, kind, root, data, table, timeout) the bytes of all objects, where `table`, what
//                                                   `call` gave, is not all of them
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings/calls/remembered_calls.h"

namespace pycoll {

struct ObjectCall {
  RunnableCall call;
  Py_ssize_t room = 0, rows = 0;
  int64_t root = 0;
  bool sends = false, reads = false;
  pybind11::object kind, pack, unpack, rest;
};

// The arguments of such a call, in the order in which they are passed around.
enum ObjectArg { kObjectKind, kObject, kObjectRoot, kPickle, kObjectTimeout };

// Runs a call of a communicator. Null with a Python error set if it has failed; NotImplemented if
// Python code is to serve it.
PyObject* call_object(PyObject* fastcall, PyObject* const* args);

PyObject* remember_object(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs);

}  // namespace pycoll
