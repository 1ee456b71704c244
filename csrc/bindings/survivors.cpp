// The part of pycoll._C for finding which ranks of a communicator are left.
#include "engine/survivors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "base/one_thread.h"
#include "bindings/bindings.h"

namespace py = pybind11;
namespace pycoll {
namespace {

// Gives up when the time is over; throws when a signal handler has raised.
Survivors::Check until(double timeout_s) {
  return [end = deadline_after(timeout_s)](Pulse pulse) {
    if (pulse == Pulse::kSlice) {
      COLL_CHECK(!check_signals(nullptr), "Interrupted", "shrink was interrupted");
    }
    return now_ns() >= end;
  };
}

}  // namespace

void bind_survivors(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<Use>(m, "Use");
  py::enum_<Round>(m, "Round")
      .value("JOINED", Round::kJoined)
      .value("ANOTHER", Round::kAnother)
      .value("LATE", Round::kLate);
  py::class_<Survivors>(m, "Survivors")
      .def(py::init<std::shared_ptr<ControlSegment>, uint32_t, bool>(), "control"_a, "rank"_a,
           "threads"_a)
      .def(
          "agree",
          [](Survivors& s, int offer, double timeout_s) {
            return s.agree(offer, until(timeout_s));
          },
          "offer"_a, "timeout_s"_a, Release())
      .def("offered",
           [](const Survivors& s, uint32_t rank) {
             return py::make_tuple(s.pid_of(rank), s.offer_of(rank));
           })
      .def("offers", &Survivors::offers)
      .def(
          "await_other_offer",
          [](const Survivors& s, uint32_t rank, double timeout_s) {
            return s.await_other_offer(rank, until(timeout_s));
          },
          "rank"_a, "timeout_s"_a, Release())
      .def(
          "join", [](Survivors& s, double timeout_s) { return s.join(until(timeout_s)); },
          "timeout_s"_a, Release())
      .def("missing", &Survivors::missing);
}

}  // namespace pycoll
