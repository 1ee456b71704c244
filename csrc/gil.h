// Letting go of Python's global lock, also in threads that outlive the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace pycoll {

// The thread that ends the interpreter; set when it begins to.
inline std::atomic<std::thread::id> ending_thread{};

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
// of the process. Python 3.14 does so itself; earlier ones end the thread by unwinding its stack,
// through destructors that need the lock or must not be unwound.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() {
    while (interpreter_is_ending() && ending_thread.load() != std::this_thread::get_id()) pause();
    PyEval_RestoreThread(thread_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace pycoll
