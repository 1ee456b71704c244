// What the files of bindings share. They convert arguments and errors and let go of Python's lock,
// and may use everything else in csrc; contracts are in the headers of what they bind.
//
// Read module.cpp first; fast_path.h is how a collective gets from a method to the engine.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "memory/board.h"
#include "memory/sight.h"

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
  void let_go() override {
    if (before_ != nullptr) before_->let_go();
    unlocked_.emplace();
  }
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

// Runs Python's signal handlers; true if one raised.
bool check_signals(void* context);

// A Binding of the numbers that Python gives by name: dtype, op, itemsize, count, chunk, layout_in,
// layout_out, descriptor, scale_n, scale_at_exit, extents.
Binding make_binding(std::shared_ptr<Plan> plan, const pybind11::kwargs& numbers);

// Sets what Python code gets for an error of the engine: EngineError(kind, text); MemoryError and
// pending Python exceptions stay what they are.
void raise_in_python(const Error& error);

// Adds the type `AddressCall`; calls/address_call.cpp.
//
//   call = AddressCall(engine, bound); call(x, out, site, timeout_s)
//
// is `engine.run(bound, x, out, site, timeout_s)`, and does not keep the engine.
void bind_address_call(pybind11::module_& m);

void bind_arrays(pybind11::module_& m);          // calls/arguments.cpp
void bind_control(pybind11::module_& m);         // control.cpp
void bind_atomics(pybind11::module_& m);         // atomics.cpp
void bind_memory(pybind11::module_& m);          // memory.cpp
void bind_kernels(pybind11::module_& m);         // kernels.cpp
void bind_p2p(pybind11::module_& m);             // calls/p2p.cpp
void bind_message_engine(pybind11::module_& m);  // messages.cpp

using Release = pybind11::call_guard<Unlocked>;

template <typename T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline pybind11::str decoded(const char* text) {
  return pybind11::reinterpret_steal<pybind11::str>(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace"));
}

// An engine's report of a failure as a dict, None without a failure. rank_report(rank, entry) makes
// one of its entries for each rank.
template <typename AnyEngine, typename RankReportOf>
pybind11::object report_of(AnyEngine& engine, const RankReportOf& rank_report) {
  const auto found = [&] {
    const Unlocked unlocked;  // whoever has the engine's mutex may wait for Python's lock
    return engine.report();
  }();
  if (found.cause == Cause::kNone) return pybind11::none();
  pybind11::dict out;
  out["cause"] = static_cast<int>(found.cause);
  out["culprit"] = found.culprit;
  out["reporter"] = found.reporter;
  out["iteration"] = found.iteration;
  out["text"] = found.text;
  pybind11::list ranks;
  for (uint32_t rank = 0; rank < found.ranks.size(); ++rank) {
    ranks.append(rank_report(rank, found.ranks[rank], found.iteration));
  }
  out["ranks"] = ranks;
  return out;
}

// What the call with this ticket has failed with: None or (kind, text). Unlike a wait for it, this
// raises nothing, so whatever is raised meanwhile is known to come from a signal handler.
template <typename AnyEngine>
pybind11::object error_of_ticket(AnyEngine& engine, uint64_t ticket) {
  const std::exception_ptr failure = engine.error(ticket);
  if (failure == nullptr) return pybind11::none();
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return pybind11::make_tuple(error.kind(), error.what());
  } catch (const std::bad_alloc& error) {
    return pybind11::make_tuple("MemoryError", error.what());
  } catch (const std::exception& error) {
    return pybind11::make_tuple("CollError", error.what());
  }
}

// Adds the methods, and functions of the module, that all engines of one level have.
template <typename E, typename Class>
void add_engine_methods(pybind11::module_& m, Class& cls) {
  using namespace pybind11::literals;
  cls.def("site", [](E& e, std::string_view text) { return e.site(text); })
      .def("share_cores",
           [](E& e, uint32_t ranks, uint32_t cores) { e.share_cores({ranks, cores}); })
      .def("done", &E::done, Release())
      .def("wait", &E::wait, Release())
      .def(
          "refuse", [](E& e, const std::string& text, uint32_t site) { e.refuse(text, site); },
          Release())
      .def(
          "abort", [](E& e, const std::string& text) { e.abort(text); }, Release())
      .def(
          "leave", [](E& e, const std::string& text) { e.leave(text); }, Release())
      .def("check_unused", &E::check_unused)
      .def("close", &E::close, Release())
      .def_property_readonly("iteration", &E::iteration);
  m.def("error_of", &error_of_ticket<E>, "engine"_a, "ticket"_a);
  m.def("forget", [](E& e, uint64_t ticket) { e.forget(ticket); }, "engine"_a, "ticket"_a);
}

// Adds send(data, nbytes, type, dst, tag, ...) and recv(data, nbytes, type, src, tag, ...).
template <typename Box, typename... Last, typename Class>
void add_send_recv(Class& cls) {
  cls.def(
         "send",
         [](Box& box, uintptr_t data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
            Last... last) { return box.send(pointer(data), nbytes, type, dst, tag, last...); },
         Release())
      .def(
          "recv",
          [](Box& box, uintptr_t data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
             Last... last) { return box.recv(pointer(data), nbytes, type, src, tag, last...); },
          Release());
}

// Adds the methods of a box that sends and receives in the background.
template <typename Box, typename Class>
void add_postbox_methods(Class& cls) {
  add_send_recv<Box>(cls);
  cls.def("done", &Box::done, Release())
      .def("forget", &Box::forget, Release())
      .def("probe",
           [](Box& box, int32_t src, int64_t tag, double timeout_s) -> pybind11::object {
             const auto found = [&] {
               const Unlocked unlocked;
               return box.probe(src, tag, timeout_s);
             }();
             if (!found) return pybind11::none();
             return pybind11::make_tuple(found->src, found->tag, found->type, found->nbytes);
           })
      .def("wait", &Box::wait, Release())
      .def("finish_send", &Box::finish_send, Release())
      .def("close", &Box::close, Release());
}

// What a rank shows, by the names of RankSight. control.cpp.
pybind11::dict rank_dict(const RankSight& sight, uint32_t rank);

// The connections that a board shows, a dict for each peer; those of which nothing is known are
// left out. control.cpp.
pybind11::dict links_of(const Board& board);

}  // namespace pycoll
