// Places in Python programs that make calls. The innermost frame of this thread is read without
// making an object of it: since Python 3.11 that costs some 0.1 us for every function that makes a
// call.
#pragma once

#include <pybind11/pybind11.h>
#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif

#include <array>
#include <cstdint>

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

// The place `depth` frames further out than the innermost one.
inline CodePlace outer_place(int depth) {
  const auto* frame = reinterpret_cast<const Frame311*>(PyThreadState_Get()->cframe->current_frame);
  for (; frame != nullptr && depth > 0; --depth) frame = frame->previous;
  if (frame == nullptr) return {};
  const auto first = reinterpret_cast<uintptr_t>(frame->code->co_code_adaptive);
  const auto code = reinterpret_cast<PyObject*>(frame->code);
  return {pybind11::reinterpret_borrow<pybind11::object>(code),
          static_cast<int>(reinterpret_cast<uintptr_t>(frame->instruction) - first)};
}

inline CodePlace innermost_place() { return outer_place(0); }

#else

inline CodePlace innermost_place() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return {};
  const auto code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
  return {pybind11::reinterpret_steal<pybind11::object>(code), frame->f_lasti};
}

#endif

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030C0000

inline CodePlace outer_place(int depth) {
  const auto frame_of = [](const pybind11::object& object) {
    return reinterpret_cast<PyFrameObject*>(object.ptr());
  };
  auto frame = pybind11::reinterpret_borrow<pybind11::object>(
      reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (; frame && depth > 0; --depth) {
    frame = pybind11::reinterpret_steal<pybind11::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetBack(frame_of(frame))));
  }
  if (!frame) return {};
  const auto code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame_of(frame)));
#if PY_VERSION_HEX >= 0x030B0000
  const int lasti = PyFrame_GetLasti(frame_of(frame));
#else
  const int lasti = frame_of(frame)->f_lasti;
#endif
  return {pybind11::reinterpret_steal<pybind11::object>(code), lasti};
}

#endif

// A place and its number.
struct KnownPlace {
  CodePlace place;
  uint32_t number = 0;

  bool is(const CodePlace& other) const {
    return place.code.ptr() == other.code.ptr() && place.lasti == other.lasti;
  }
};

// Numbers of places; a new one takes the slot of another.
class KnownPlaces {
 public:
  KnownPlace& operator[](const CodePlace& place) {
    const auto code = reinterpret_cast<uintptr_t>(place.code.ptr());
    return slots_[(code / 64 + static_cast<size_t>(place.lasti)) % slots_.size()];
  }

 private:
  std::array<KnownPlace, 256> slots_;
};

}  // namespace pycoll
