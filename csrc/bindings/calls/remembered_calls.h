// Calls that the hot path from Python remembers, and the Python type whose objects have them; see
// fast_path.h.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/calls/arguments.h"
#include "bindings/calls/python_frame.h"
#include "bindings/p2p/message_calls.h"
#include "engine/engine.h"
#include "transports/two_level.h"

namespace pycoll {

inline constexpr size_t kSets = 256, kWays = 4;  // of remembered calls
inline constexpr intptr_t kApart = std::numeric_limits<intptr_t>::min();

// What must be the same for a remembered call to serve again. Objects are compared by identity.
struct CallKey {
  std::array<PyObject*, 5> objects{};  // kind, op, root, order, algorithm
  ArrayKey x, out;
  intptr_t shift = kApart;  // bytes from x to out where they overlap

  bool operator==(const CallKey& other) const {
    static_assert(std::has_unique_object_representations_v<CallKey>);
    const auto word = [](const CallKey& key, size_t i) {
      uint64_t value;
      std::memcpy(&value, reinterpret_cast<const char*>(&key) + i * sizeof(value), sizeof(value));
      return value;
    };
    uint64_t differ = 0;  // in fewer instructions than memcmp takes
    for (size_t i = 0; i < sizeof(CallKey) / sizeof(uint64_t); ++i) {
      differ |= word(*this, i) ^ word(other, i);
    }
    return differ == 0;
  }
};

struct RunnableCall {
  std::shared_ptr<const BoundCall> call;
  std::shared_ptr<const StagedCall> staged;  // instead of `call`
};

struct RememberedCall : RunnableCall {
  CallKey key;
  std::optional<ArrayKey> fresh;  // the result to allocate
  std::string neutral;            // an element, to fill a result with that no rank contributes to
  pybind11::object kept[8];       // references to what the keys point to

  bool serves(const CallKey& other) const {
    return (call != nullptr || staged != nullptr) && key == other;
  }
};

// The calls whose keys have one hash. It stays where it is as long as the state.
struct CallSet {
  std::array<RememberedCall, kWays> ways;
  uint32_t next = 0;  // the one to go if all are taken
};

struct ObjectCall;  // object_calls.h
struct SizedCall;   // sized_calls.h

// What ranks have said of the sizes of a call that Python code then goes on with.
struct SaidSizes {
  unsigned long thread = 0;
  std::array<PyObject*, 7> call{};  // its arguments, compared by identity
  pybind11::object table;
};

struct FastcallState {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<MessageEngine> mpi;   // instead of `engine`
  std::shared_ptr<TwoLevelEngine> two;  // likewise
  std::shared_ptr<Heap> heap;
  MessagePath messages;
  pybind11::object number, boolean;  // numpy.number and numpy.bool_
  pybind11::object session;          // a weak reference
  pybind11::object freed;            // raises what is raised once the session is no more
  pybind11::object in_flight,
      flight;  // what keeps the arrays of queued calls, and the type for one
  std::array<std::unique_ptr<CallSet>, kSets> sets;  // those that have been needed
  std::vector<std::shared_ptr<const SizedCall>> sized;
  std::vector<std::shared_ptr<const ObjectCall>> objects;
  SaidSizes said;
  pybind11::dict dtypes;  // of remembered calls: one of those that are equal
  KnownPlaces sites;
  uint32_t running = 0;                           // calls of all threads that hold no references
  std::vector<std::shared_ptr<const void>> gone;  // what they may use, and is no longer here
};

// A call that uses what the state has now, which is cheaper than a reference to it. Made and ended
// by threads that have Python's lock.
class RunningCall {
 public:
  explicit RunningCall(FastcallState& state) : state_(state) { ++state_.running; }
  ~RunningCall() {
    if (--state_.running > 0 || state_.gone.empty()) return;
    const auto gone = std::move(state_.gone);
    state_.gone.clear();
  }
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;

 private:
  FastcallState& state_;
};

struct Fastcall {
  PyObject_HEAD FastcallState* state;
};

// The arrays of a call, and what keeps them.
struct CallArrays {
  ArrayMemory in, out;
  pybind11::object x, result;
};

// The place of the set for calls like this one.
size_t set_of(const CallKey& key);

// Describes a call; false if only Python code can serve it.
bool make_key(const FastcallState& state, PyObject* const* args, CallKey& key, CallArrays& arrays);

// Puts the dtypes that are remembered in the place of others that are equal, as those are that came
// out of a pickle. Returns whether there were any.
bool unify_dtypes(const FastcallState& state, CallKey& key);

// Throws TypeError if it is none.
FastcallState& state_of(PyObject* fastcall);

// What a BoundCall of Python's, or a StagedCall, runs.
RunnableCall runnable(const FastcallState& state, pybind11::handle call);

// Whether a call that `state` knows could run now: the communicator is open, and no call in the
// background of two levels comes before it.
bool can_run(const FastcallState& state);

// The session. Throws what `freed` raises.
pybind11::object session_of(const FastcallState& state);

// The id of the line that called the communicator's method: the innermost Python frame. May run
// Python code. fast_path.cpp, as what follows.
uint32_t call_site(FastcallState& state);

// Lets peers hear of an interrupt before the engine has a call: they would take the next call of
// this rank for this one.
void tell_of_interrupt(const FastcallState& state, pybind11::error_already_set& error);

// Likewise of any other exception.
void tell_of_error(const FastcallState& state, const pybind11::error_already_set& error);

// Prepares a call, as `refusing` of the session does.
template <typename F>
auto refusing(const FastcallState& state, const F& prepare) {
  try {
    return prepare();
  } catch (pybind11::error_already_set& error) {
    tell_of_error(state, error);
    throw;
  }
}

// Runs a call; null with a Python error set if it has failed. Only calls of an Engine have detours.
PyObject* run(FastcallState& state, const RunnableCall& call, CallArrays& arrays, uint32_t site,
              double limit_s, std::shared_ptr<const Detours> detours = nullptr);

}  // namespace pycoll
