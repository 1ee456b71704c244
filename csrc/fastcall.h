// The hot path from Python: one C call from a communicator's method to the engine.
#pragma once

#include <pybind11/pybind11.h>

namespace pycoll {

// Adds the type `Fastcall` to the module.
//
//   fast = Fastcall(engine, heap, slow, site, fail)
//   fast(kind, x, out, op, root, order, algorithm=None, timeout=None, async_op=False)
//   fast.remember(bound_call, kind, x, out, op, root, order, algorithm, allocates)
//
// A call whose arguments are NumPy arrays of shapes, dtypes and memory that were remembered, with all
// other arguments being the very objects that were remembered, goes straight to the engine. Every other
// call goes to `slow`, with the same arguments. `site()` returns the id of the call site (asked once
// per place in the program), `fail(kind, text)` raises the exception for an engine error.
void add_fastcall(pybind11::module_& m);

}  // namespace pycoll
