// The part of pycoll._C that is about messages: engines over them. Conversions only; contracts are
// in the headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/owned_class.h"
#include "transports/messages/message_engine.h"
#include "transports/mpi/mpi_api.h"
#include "transports/tcp/socket_api.h"
#include "transports/two_level.h"

namespace py = pybind11;
namespace pycoll {
namespace {

std::shared_ptr<MpiApi> make_mpi(std::string module, uintptr_t comm, uintptr_t byte, int tag_ub,
                                 bool multiple, int proc_failed) {
  return std::make_shared<MpiApi>(
      MpiFacts{std::move(module), comm, byte, tag_ub, multiple, proc_failed});
}

std::shared_ptr<MessageEngine> make_message_engine(std::shared_ptr<Transport> api,
                                                   std::vector<int> members, uint32_t rank,
                                                   uint32_t context, double timeout_s,
                                                   uint64_t cookie, bool early) {
  const MessageOptions options{timeout_s, cookie, early, check_signals};
  return std::make_shared<MessageEngine>(std::move(api), std::move(members), rank, context,
                                         options);
}

py::dict notice_report(uint32_t rank, const Notice& notice, uint64_t iteration) {
  py::dict out;
  const bool known = notice.kind != 0;
  out["rank"] = rank;
  out["answered"] = known;
  out["entered"] = known && notice.in_call != 0 && notice.seq == iteration;
  out["left_early"] = notice.kind == Notice::kPast;
  out["state"] = std::string("?");
  out["descriptor"] = notice.descriptor;
  out["count"] = notice.count;
  out["step"] = notice.waiting_step;
  out["waiting_peer"] = notice.waiting_peer;
  out["waiting_step"] = notice.waiting_step;
  out["waiting_s"] = static_cast<double>(notice.waiting_ns) * 1e-9;
  out["site"] = std::string(notice.site);
  out["text"] = decoded(notice.text);
  return out;
}

using BoundStagePieces = std::tuple<std::shared_ptr<BoundCall>, int, int>;

BoundStage make_stage(BoundStagePieces pieces) {
  const auto& [call, source, target] = pieces;
  return {call, static_cast<StageArray>(source), static_cast<StageArray>(target)};
}

void bind_two_level(py::module_& m) {
  using namespace pybind11::literals;
  OwnedClass<StagedCall>(m, "StagedCall")
      .def(py::init([](const std::vector<std::array<BoundStagePieces, 4>>& slices,
                       uint64_t scratch_bytes, bool hosts_first) {
             auto call = std::make_shared<StagedCall>();
             for (const auto& s : slices) {
               call->slices.push_back(
                   {make_stage(s[0]), make_stage(s[1]), make_stage(s[2]), make_stage(s[3])});
             }
             call->scratch_bytes = scratch_bytes;
             call->hosts_first = hosts_first;
             return call;
           }),
           "slices"_a, "scratch_bytes"_a, "hosts_first"_a);
  OwnedClass<TwoLevelEngine>(m, "TwoLevelEngine")
      .def(made<TwoLevelEngine, std::shared_ptr<Engine>, std::shared_ptr<MessageEngine>>(),
           "node"_a, "flat"_a)
      .def("site", &TwoLevelEngine::site)
      .def(
          "run",
          [](TwoLevelEngine& e, const StagedCall& call, uintptr_t in, uintptr_t out, uint32_t site,
             double timeout_s) { e.run(call, pointer(in), pointer(out), site, timeout_s); },
          Release())
      .def("trace", &TwoLevelEngine::trace, "trace"_a, Release())
      .def("queue", &TwoLevelEngine::queue)
      .def("check_unused", &TwoLevelEngine::check_unused)
      .def_property_readonly("failed_inside", &TwoLevelEngine::failed_inside);
}

}  // namespace

void bind_message_engine(py::module_& m) {
  using namespace pybind11::literals;
  OwnedClass<Transport>(m, "Transport");
  OwnedClass<MpiApi, Transport>(m, "MpiApi")
      .def(py::init(&make_mpi), "module"_a, "comm"_a, "byte"_a, "tag_ub"_a, "multiple"_a,
           "proc_failed"_a);
  OwnedClass<SocketApi, Transport>(m, "SocketApi")
      .def(made<SocketApi, std::vector<int>, std::vector<std::string>, double>(), "sockets"_a,
           "names"_a, "silence_s"_a = SocketApi::kSilenceS)
      .def("close", &SocketApi::close, "patience_s"_a = 1.0, Release())
      .def("links",
           [](SocketApi& api) {
             const auto board = api.board();
             return board == nullptr ? py::dict() : links_of(*board);
           })
      .def("forget", &SocketApi::forget);
  OwnedClass<MessageEngine> engine(m, "MessageEngine");
  add_engine_methods<MessageEngine>(m, engine);
  engine
      .def(py::init(&make_message_engine), "api"_a, "members"_a, "rank"_a, "context"_a,
           "timeout_s"_a, "cookie"_a = 0, "early"_a = false)
      .def(
          "bind_messages",
          [](const MessageEngine& e, std::shared_ptr<Plan> plan, uint64_t segment_bytes,
             uint64_t eager_bytes, uint64_t message_chunks, uint64_t slots, bool agree,
             std::vector<uint32_t> team, const py::kwargs& numbers) {
            MessageLimits limits;
            limits.segment_bytes = segment_bytes;
            limits.eager_bytes = eager_bytes;
            limits.message_chunks = message_chunks;
            limits.slots = slots;
            return e.bind(make_binding(std::move(plan), numbers), limits, agree, std::move(team));
          },
          "plan"_a, "segment_bytes"_a, "eager_bytes"_a, "message_chunks"_a, "slots"_a, "agree"_a,
          "team"_a)
      .def(
          "run",
          [](MessageEngine& e, const BoundCall& call, uintptr_t in, uintptr_t out, uint32_t site,
             double timeout_s) { e.run(call, pointer(in), pointer(out), site, timeout_s); },
          Release())
      .def(
          "submit",
          [](MessageEngine& e, std::shared_ptr<BoundCall> call, uintptr_t in, uintptr_t out,
             uint32_t site, double timeout_s) {
            return e.submit(std::move(call), pointer(in), pointer(out), site, timeout_s);
          },
          Release())
      .def("trace", &MessageEngine::trace, "trace"_a, Release())
      .def(
          "look",
          [](MessageEngine& e, uint32_t calls) -> py::object {
            if (e.board() == nullptr) return py::none();
            return rank_dict(look_at(*e.board(), calls), e.link().rank());
          },
          "calls"_a = 0)
      .def("prove", &MessageEngine::prove, Release())
      .def("unproven",
           [](MessageEngine& e) {
             const auto found = [&] {
               const Unlocked unlocked;
               return e.unproven();
             }();
             py::list calls;
             for (const PastCall& call : found) {
               calls.append(py::make_tuple(call.seq, call.descriptor, call.count, call.site_text));
             }
             return calls;
           })
      .def("skip", &MessageEngine::skip, Release())
      .def("await_refusal", &MessageEngine::await_refusal, Release())
      .def("raise_on_all", &MessageEngine::raise_on_all, Release())
      .def("poll", &MessageEngine::poll, Release())
      .def("report", [](MessageEngine& e) { return report_of(e, notice_report); })
      .def_property_readonly("failed", &MessageEngine::failed);
  // No transport can stop in the middle of a message. What such a message refers to has to stay,
  // even when Python ends: MPI_Finalize comes after that.
  m.def("never_free", [](py::object owner) { owner.release(); }, "owner"_a);
  bind_two_level(m);
}

}  // namespace pycoll
