// What the files of bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/engine.h"

namespace pycoll {

// Runs Python's signal handlers; true if one raised.
bool check_signals(void* context);

// A Binding of the numbers that Python gives by name: dtype, op, itemsize, count, chunk, layout_in,
// layout_out, descriptor, scale_n, scale_at_exit, extents.
Binding make_binding(std::shared_ptr<Plan> plan, const pybind11::kwargs& numbers);

// Sets what Python code gets for an error of the engine: EngineError(kind, text); MemoryError and
// pending Python exceptions stay what they are.
void raise_in_python(const Error& error);

// Adds the type `AddressCall`; address_call.cpp.
//
//   call = AddressCall(engine, bound); call(x, out, site, timeout_s)
//
// is `engine.run(bound, x, out, site, timeout_s)`, and does not keep the engine.
void bind_address_call(pybind11::module_& m);

void bind_arrays(pybind11::module_& m);          // arrays.cpp
void bind_memory(pybind11::module_& m);          // memory.cpp
void bind_optim(pybind11::module_& m);           // optim.cpp
void bind_mail(pybind11::module_& m);            // p2p.cpp
void bind_message_engine(pybind11::module_& m);  // messages.cpp
void bind_queue(pybind11::module_& m);           // queue.cpp
void bind_survivors(pybind11::module_& m);

}  // namespace pycoll
