// Calls for which ranks first tell each other sizes: v-variants. They are methods of `Fastcall`,
// see fast_path.h:
//
//   fast.on_bytes(call, data, nbytes, site, timeout_s)
//
// runs a bound or staged call on the memory of `data`, bytes, and returns the `nbytes` bytes of its
// result.
//
//   fast.remember_sized(kind, x, out, op, root, order, sizes, tell, row, table, move, result, told,
//                       rank)
//   fast.run_sized(kind, x, out, op, root, order, sizes, site, timeout_s, counted)
//
// The second runs a v-variant like one that was remembered: on arrays of these shapes and dtypes,
// with equal `sizes`, a list of ints, and all else being the very objects that were remembered.
// First `tell` gives all ranks the `row` of each. If that makes the `table` of then, `move` runs on
// the arrays, and its result is returned; if not, the bytes of the new table, and nothing has been
// moved. `result` is an array like the one to allocate, or None. `told` is what ranks tell each
// other: the rows that each has for all or for the root (1), or for each (2), so that calls whose
// sizes are others are served, too; or anything else (0).
//
// Where only Python code can serve a call, and where nothing like it is remembered, on_bytes and
// run_sized do nothing, and return NotImplemented.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/calls/arguments.h"
#include "bindings/calls/fast_path.h"
#include "bindings/calls/remembered_calls.h"

namespace pycoll {

struct SizedKey {
  std::array<PyObject*, 4> objects{};  // kind, op, root, order: compared by identity
  ArrayKey x, out;
  std::vector<int64_t> sizes;

  bool operator==(const SizedKey&) const = default;
};

enum class ToldSizes : uint8_t { kOther, kOfEach, kFromEachToEach };

struct SizedCall {
  SizedKey key;
  ToldSizes told = ToldSizes::kOther;
  size_t rank = 0;  // this one
  RunnableCall tell, move;
  pybind11::object row, table;    // bytes
  std::optional<ArrayKey> fresh;  // the result to allocate
  pybind11::object kept[7];       // references to what the keys point to
};

// The arguments of a v-variant, in the order in which they are passed around; those before are
// kKind to kOrder of Arg.
enum SizedArg { kSizes = kOrder + 1, kSizedTimeout, kReturnCounts };

// Runs a call of a communicator, as run_sized does. Null with a Python error set if it has failed;
// NotImplemented if Python code is to serve it, which then gets from run_sized what ranks have said
// already, if they have.
PyObject* call_sized(PyObject* fastcall, PyObject* const* args);

// Runs a call on bytes, and returns those that it gives. Null with a Python error set if it has
// failed.
pybind11::object tell(FastcallState& state, const RunnableCall& call, const pybind11::object& data,
                      Py_ssize_t nbytes, uint32_t site, double limit_s);

PyObject* run_on_bytes(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs);
PyObject* remember_sized(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs);
PyObject* run_sized(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs);

}  // namespace pycoll
