// Letting go of Python's global lock, also in threads that outlive the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

#include "engine/wait.h"

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

}  // namespace pycoll
