// Letting go of Python's global lock, also in threads that outlive the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

#include "base/error.h"
#include "base/wait.h"
#include "engine/engine.h"

namespace pycoll {

inline bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Other Python threads may run while it lives.
//
// A thread that wants the lock back after the interpreter has begun to end waits here for the end
// of the process, as Python 3.14 does it. Earlier ones end the thread by unwinding its stack,
// through destructors that need the lock, or in the middle of an exception. The unwinding is
// caught, and the handler never left: that is the one way to stop it.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {
      for (;;) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

// Other Python threads may run as soon as this one would give its core away. For short work.
class UnlockedInWaits final : public Held {
 public:
  UnlockedInWaits() : before_(held) { held = this; }
  ~UnlockedInWaits() {
    if (!unlocked_.has_value()) held = before_;
  }
  void let_go() override { unlocked_.emplace(); }
  UnlockedInWaits(const UnlockedInWaits&) = delete;
  UnlockedInWaits& operator=(const UnlockedInWaits&) = delete;

 private:
  Held* before_;
  std::optional<Unlocked> unlocked_;
};

// Whether an engine does all of it at once, and soon: then the lock is kept until it waits.
template <typename E>
bool is_short(const E* engine, const BoundCall* call) {
  constexpr uint64_t kShortBytes = 16 << 10;
  return engine != nullptr && call->in_bytes + call->out_bytes <= kShortBytes && engine->prompt();
}

// Works without the lock; returns the error that ends it, if any.
template <typename Unlock, typename Work>
std::optional<Error> error_of(const Work& work) {
  const Unlock unlock;
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

// Works without the lock, all the time or once it waits; returns the error that ends it, if any.
template <typename E, typename Work>
std::optional<Error> error_of_call(const E* engine, const BoundCall* call, const Work& work) {
  return is_short(engine, call) ? error_of<UnlockedInWaits>(work) : error_of<Unlocked>(work);
}

}  // namespace pycoll
