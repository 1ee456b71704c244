// Calls on registered arrays, on the hot path from Python.
#pragma once

#include "bindings/calls/remembered_calls.h"

namespace pycoll {

inline bool has_registered(const CallKey& key) {
  return key.x.place == Place::kRegistered || key.out.place == Place::kRegistered;
}

// Runs a call like a remembered one on arrays that are registered where those were. They stay where
// they are meanwhile. Null without a Python error if another thread has unregistered one.
PyObject* run_registered(FastcallState& state, const RememberedCall& like, CallArrays& arrays,
                         uint32_t site, double limit_s);

}  // namespace pycoll
