// Calls on small Python objects, from a method of the communicator to the engine. A method of
// `Fastcall`, see fast_path.h:
//
//   fast.remember_object(kind, root, call, room, given, came, sends, reads, functions)
//
// lets the extension serve calls of this kind and root. The caller gives a list of `given` objects,
// or one object if that is 0, and gets a list of `came` objects, or one, that of the root, if that
// is 0. `call` moves the first `room` bytes of each: a head, and what there is room for of the
// object as bytes. This rank gives any, and reads those that come, or not. The functions are
//
//   pack(x, pickle)                                 an object as bytes
//   unpack(data, pickle, sender)                    and back
//   rest(session, kind, root, data, came, timeout)  the bytes of all objects that come, where
//                                                   `came`, what `call` gave, is not all of them;
//                                                   `data` are the bytes of those given
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings/calls/remembered_calls.h"

namespace pycoll {

struct ObjectCall {
  RunnableCall call;
  Py_ssize_t room = 0, given = 0, came = 0;
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
