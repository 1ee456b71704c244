// Calls on registered arrays, on the hot path from Python.
#pragma once

#include <optional>

#include "bindings/calls/remembered_calls.h"
#include "memory/registration.h"

namespace pycoll {

inline bool has_registered(const CallKey& key) {
  return key.x.place == Place::kRegistered || key.out.place == Place::kRegistered;
}

// Keeps memory where it is for as long as this exists, if all of it is registered.
class HoldOf {
 public:
  HoldOf(const Heap* heap, const void* data, uint64_t nbytes) {
    if (heap != nullptr && heap->is_aliased(data, nbytes)) [[unlikely]]
      hold(*heap, data, nbytes);
  }

 private:
  void hold(const Heap& heap, const void* data, uint64_t nbytes);

  std::optional<Hold> hold_;
};

// Runs a call like a remembered one on arrays that are registered where those were. They stay where
// they are meanwhile. Null without a Python error if another thread has unregistered one.
PyObject* run_registered(FastcallState& state, const RememberedCall& like, CallArrays& arrays,
                         uint32_t site, double limit_s);

}  // namespace pycoll
