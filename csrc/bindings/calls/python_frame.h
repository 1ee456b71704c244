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
#include <utility>

namespace pycoll {

// Which code runs, and how many bytes it is in it.
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

inline const Frame311* innermost_frame() {
  return reinterpret_cast<const Frame311*>(PyThreadState_Get()->cframe->current_frame);
}

inline CodePlace place_of(const Frame311* frame) {
  if (frame == nullptr) return {};
  const auto first = reinterpret_cast<uintptr_t>(frame->code->co_code_adaptive);
  const auto code = reinterpret_cast<PyObject*>(frame->code);
  return {pybind11::reinterpret_borrow<pybind11::object>(code),
          static_cast<int>(reinterpret_cast<uintptr_t>(frame->instruction) - first)};
}

// The place `depth` frames further out than the innermost one.
inline CodePlace outer_place(int depth) {
  const Frame311* frame = innermost_frame();
  for (; frame != nullptr && depth > 0; --depth) frame = frame->previous;
  return place_of(frame);
}

inline CodePlace innermost_place() { return place_of(innermost_frame()); }

// The innermost place outside of all code for which inside(code) is true.
template <typename Inside>
CodePlace place_outside(const Inside& inside) {
  const Frame311* frame = innermost_frame();
  while (frame != nullptr && inside(reinterpret_cast<PyObject*>(frame->code))) {
    frame = frame->previous;
  }
  return place_of(frame);
}

#else

inline CodePlace innermost_place() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return {};
  const auto code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
  const int lasti = frame->f_lasti * static_cast<int>(sizeof(_Py_CODEUNIT));
  return {pybind11::reinterpret_steal<pybind11::object>(code), lasti};
}

#endif

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030C0000

// A frame as an object, or null.
class FrameObject {
 public:
  static FrameObject innermost() {
    return pybind11::reinterpret_borrow<pybind11::object>(
        reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  }
  explicit operator bool() const { return static_cast<bool>(frame_); }
  FrameObject outer() const {
    return pybind11::reinterpret_steal<pybind11::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetBack(get())));
  }
  pybind11::object code() const {
    return pybind11::reinterpret_steal<pybind11::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(get())));
  }
  CodePlace place() const {
    if (!frame_) return {};
#if PY_VERSION_HEX >= 0x030B0000
    return {code(), PyFrame_GetLasti(get())};
#else
    return {code(), get()->f_lasti * static_cast<int>(sizeof(_Py_CODEUNIT))};
#endif
  }

 private:
  FrameObject(pybind11::object frame) : frame_(std::move(frame)) {}
  PyFrameObject* get() const { return reinterpret_cast<PyFrameObject*>(frame_.ptr()); }

  pybind11::object frame_;
};

inline CodePlace outer_place(int depth) {
  FrameObject frame = FrameObject::innermost();
  for (; frame && depth > 0; --depth) frame = frame.outer();
  return frame.place();
}

template <typename Inside>
CodePlace place_outside(const Inside& inside) {
  FrameObject frame = FrameObject::innermost();
  while (frame && inside(frame.code().ptr())) frame = frame.outer();
  return frame.place();
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
    // The calls of one function are often equally far apart.
    uint64_t h = reinterpret_cast<uintptr_t>(place.code.ptr()) / 16 * 0x9E3779B97F4A7C15u;
    h = (h ^ static_cast<uint64_t>(place.lasti)) * 0x9E3779B97F4A7C15u;
    return slots_[h >> 54];
  }

 private:
  std::array<KnownPlace, 1024> slots_;
};

// Adds the type `ProgramPlaces`.
//
//   places = ProgramPlaces(); places.find()
//
// is the number of the innermost place outside of the library, or 0: then Python code looks for it,
// and tells what it has found by learn(code, inside) and number(code, lasti, number).
void bind_program_places(pybind11::module_& m);

}  // namespace pycoll
