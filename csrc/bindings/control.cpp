// The part of pycoll._C for the memory that ranks have in common: opening it, finding which ranks
// are left, and looking at it from outside.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "base/one_thread.h"
#include "bindings/bindings.h"
#include "bindings/owned_class.h"
#include "engine/survivors.h"
#include "memory/sight.h"

namespace py = pybind11;
namespace pycoll {
namespace {

// Gives up when the time is over; throws when a signal handler has raised.
Survivors::Check until(double timeout_s) {
  return [end = Deadline(timeout_s)](Pulse pulse) mutable {
    if (pulse == Pulse::kSlice) {
      COLL_CHECK(!check_signals(nullptr), "Interrupted", "shrink was interrupted");
    }
    return end.passes();
  };
}

py::dict call_dict(const CallSight& call) {
  py::dict out;
  out["call_seq"] = call.call_seq;
  out["iteration"] = call.iteration;
  out["descriptor"] = call.descriptor;
  out["count"] = call.count;
  out["done"] = call.done;
  out["site"] = decoded(call.site.c_str());
  return out;
}

// The failure that has ended the communicator: None if there is none.
py::object failure_of(const ControlSegment& control) {
  const AbortBlock& block = control.abort_block();
  const uint64_t word = block.word.load(std::memory_order_acquire);
  if (word == 0) return py::none();
  const AbortWord abort = AbortWord::unpack(word);
  const bool ready = block.ready.load(std::memory_order_acquire) != 0;
  py::dict out;
  out["cause"] = static_cast<int>(abort.cause);
  out["culprit"] = abort.culprit;
  out["reporter"] = abort.reporter;
  out["kind"] = kind_of(abort.cause);
  out["text"] = ready ? decoded(block.text) : py::str();
  return out;
}

struct Sight {
  std::shared_ptr<const ControlSegment> control;
};

std::shared_ptr<Sight> sight_of(std::shared_ptr<const ControlSegment> control) {
  return std::make_shared<Sight>(Sight{std::move(control)});
}

struct BoardSight {
  std::shared_ptr<const Board> board;
};

std::shared_ptr<BoardSight> board_sight_of(int fd) {
  return std::make_shared<BoardSight>(BoardSight{Board::view(fd)});
}

void bind_sight(py::module_& m) {
  using namespace pybind11::literals;
  OwnedClass<Sight>(m, "Sight")
      .def(py::init([](int fd) { return sight_of(ControlSegment::view(fd)); }), "fd"_a)
      .def_property_readonly("world_size",
                             [](const Sight& s) { return s.control->geometry().world_size; })
      .def_property_readonly("cookie", [](const Sight& s) { return s.control->cookie(); })
      .def_property_readonly("failure", [](const Sight& s) { return failure_of(*s.control); })
      .def(
          "rank",
          [](const Sight& s, uint32_t rank, uint32_t calls) {
            if (rank >= s.control->geometry().world_size) throw py::index_error("no such rank");
            return rank_dict(look_at(*s.control, rank, calls), rank);
          },
          "rank"_a, "calls"_a = 1);
  OwnedClass<BoardSight>(m, "BoardSight")
      .def(py::init(&board_sight_of), "fd"_a)
      .def_property_readonly("world_size",
                             [](const BoardSight& s) { return s.board->world_size(); })
      .def_property_readonly("rank", [](const BoardSight& s) { return s.board->rank(); })
      .def_property_readonly("cookie", [](const BoardSight& s) { return s.board->cookie(); })
      .def_property_readonly("inside", [](const BoardSight& s) { return s.board->inside(); })
      .def(
          "look",
          [](const BoardSight& s, uint32_t calls) {
            return rank_dict(look_at(*s.board, calls), s.board->rank());
          },
          "calls"_a = 1)
      .def("links", [](const BoardSight& s) { return links_of(*s.board); });
}

}  // namespace

py::dict rank_dict(const RankSight& sight, uint32_t rank) {
  py::dict out;
  out["rank"] = rank;
  out["phase"] = static_cast<int>(sight.phase);
  out["pid"] = sight.pid;
  out["starttime"] = sight.starttime;
  out["over"] = sight.over;
  out["call_seq"] = sight.call_seq;
  out["waiting_peer"] = sight.waiting_peer;
  out["waiting_step"] = sight.waiting_position & 0xFFFF;
  out["arrived"] = sight.arrived;
  out["waiting_s"] = static_cast<double>(sight.waiting_ns) * 1e-9;
  out["message_way"] = static_cast<int>(sight.message_way);
  out["message_peer"] = sight.message_peer;
  out["message_tag"] = sight.message_tag;
  out["message_s"] = static_cast<double>(sight.message_ns) * 1e-9;
  out["queued"] = sight.queued;
  out["text"] = decoded(sight.text.c_str());
  py::list list;
  for (const CallSight& call : sight.calls) list.append(call_dict(call));
  out["calls"] = list;
  return out;
}

py::dict links_of(const Board& board) {
  py::dict out;
  for (uint32_t peer = 0; peer < board.links(); ++peer) {
    const Link& link = board.link(peer);
    const uint64_t seen = link.seen_ns.load(std::memory_order_acquire);
    if (seen == 0) continue;
    py::dict one;
    one["seen_ns"] = seen;
    one["sent"] = link.sent.load();
    one["received"] = link.received.load();
    one["unacked"] = link.unacked.load();
    one["busy_us"] = link.busy_us.load();
    one["rtt_us"] = link.rtt_us.load();
    one["retransmits"] = link.retransmits.load();
    one["ack_age_ms"] = link.ack_age_ms.load();
    one["retries"] = link.retries.load();
    out[py::int_(peer)] = one;
  }
  return out;
}

void bind_control(py::module_& m) {
  using namespace pybind11::literals;
  bind_sight(m);
  OwnedClass<ControlSegment>(m, "Control")
      .def(py::init([](int fd, uint32_t world_size, uint64_t cell_bytes, uint64_t mailbox_bytes,
                       uint64_t start_iteration, double timeout_s) {
             const Unlocked unlocked;  // a guard would also cover the registration of the instance
             return ControlSegment::open(fd,
                                         {world_size, cell_bytes, mailbox_bytes, start_iteration},
                                         {timeout_s, check_signals});
           }),
           "fd"_a, "world_size"_a, "cell_bytes"_a, "mailbox_bytes"_a, "start_iteration"_a = 2,
           "timeout_s"_a = Patience{}.timeout_s)
      .def_static(
          "bytes",
          [](uint32_t world_size, uint64_t cell_bytes, uint64_t mailbox_bytes) {
            return ControlSegment::bytes({world_size, cell_bytes, mailbox_bytes});
          },
          "world_size"_a, "cell_bytes"_a, "mailbox_bytes"_a)
      .def("decline",
           [](ControlSegment& c, uint32_t rank, std::string_view text) { c.decline(rank, text); })
      .def_static("decline_at",
                  py::overload_cast<int, uint32_t, std::string_view, double, int32_t>(
                      &ControlSegment::decline),
                  "fd"_a, "rank"_a, "text"_a, "timeout_s"_a, "pid"_a, Release())
      .def("sight", [](std::shared_ptr<ControlSegment> c) { return sight_of(std::move(c)); })
      .def("deserted", &ControlSegment::deserted);
  OwnedClass<Use>(m, "Use");
  py::enum_<Round>(m, "Round")
      .value("JOINED", Round::kJoined)
      .value("ANOTHER", Round::kAnother)
      .value("LATE", Round::kLate);
  OwnedClass<Survivors>(m, "Survivors")
      .def(made<Survivors, std::shared_ptr<ControlSegment>, uint32_t, bool>(), "control"_a,
           "rank"_a, "threads"_a)
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
