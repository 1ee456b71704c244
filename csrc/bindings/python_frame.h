// The innermost Python frame of this thread, without making an object of it: since Python 3.11 that
// costs some 0.1 us for every function that makes a call.
#pragma once

#include <pybind11/pybind11.h>
#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif

namespace pycoll {

// Which code runs, and how far it is in it.
struct CodePlace {
  pybind11::object code;
  int lasti = -1;
};

#if PY_VERSION_HEX >= 0x030C0000

// The frame may be one of CPython's own, whose code is some other object.
inline CodePlace innermost_place() {
  PyThreadState* thread = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030D0000
  auto* frame = thread->current_frame;
#else
  auto* frame = thread->cframe->current_frame;
#endif
  if (frame == nullptr) return {};
  return {pybind11::reinterpret_steal<pybind11::object>(PyUnstable_InterpreterFrame_GetCode(frame)),
          PyUnstable_InterpreterFrame_GetLasti(frame)};
}

#elif PY_VERSION_HEX >= 0x030B0000

// How frames of 3.11 begin, for which it has no functions.
struct Frame311 {
  PyObject *function, *globals, *builtins, *locals;
  PyCodeObject* code;
  PyObject* object;
  Frame311* previous;
  _Py_CODEUNIT* instruction;
};

inline CodePlace innermost_place() {
  const auto* frame = reinterpret_cast<const Frame311*>(PyThreadState_Get()->cframe->current_frame);
  if (frame == nullptr) return {};
  const auto first = reinterpret_cast<uintptr_t>(frame->code->co_code_adaptive);
  const auto code = reinterpret_cast<PyObject*>(frame->code);
  return {pybind11::reinterpret_borrow<pybind11::object>(code),
          static_cast<int>(reinterpret_cast<uintptr_t>(frame->instruction) - first)};
}

#else

inline CodePlace innermost_place() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return {};
  const auto code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
  return {pybind11::reinterpret_steal<pybind11::object>(code), frame->f_lasti};
}

#endif

}  // namespace pycoll
