// What the ranks of a simulated job on several hosts do: over TCP or MPI, in two levels or not.
#pragma once

#include "../hosts.h"
#include "callers.h"
#include "mpi.h"
#include "transports/messages/message_postbox.h"
#include "transports/two_level.h"

namespace players {

constexpr size_t kMostOnHosts = 4500;  // elements: more than a packet has room for
constexpr double kSilenceS = 0.4;
constexpr uint64_t kBusyNs = 1'500'000'000;
constexpr uint64_t kListenNs = 500'000'000;  // for the reason of a failure elsewhere

constexpr hosts::MessagePlan kHostPlans[] = {hosts::sum_at_once, hosts::sum_in_ring,
                                             hosts::from_first};

struct HostScenario {
  uint32_t n;
  Event event;
  uint32_t culprit, second, calls, at_call;
  bool tcp, messages, background;
  bool early;                  // ranks leave calls early
  bool busy;                   // `second` does something else for a while before `at_call`
  std::vector<uint32_t> host;  // of each rank; empty: calls have one level
  uint64_t segment, eager;     // bytes
  std::vector<uint32_t> shapes, counts;
};

// Sums of the first ranks of hosts only.
inline std::shared_ptr<const Plan> sum_of_owners(uint32_t n, uint32_t rank,
                                                 const std::vector<uint32_t>& owners) {
  hosts::MessagePlanBuilder plan(n, rank, 1, n);
  std::vector<Operand> all;
  for (const uint32_t q : owners) {
    all.push_back(q == rank ? plans::in(rank, 0) : plans::cell(rank, q));
    if (q != rank) plan.recv(q, plans::cell(rank, q)).send(q, plans::in(rank, 0));
  }
  return plan.wait().fold(all, plans::out(rank, 0)).done();
}

// What ranks may hear of their last calls, beside what calls may end with.
inline bool ends_well(Event event, const std::string& kind) {
  if (event == Event::kNone) return kind.empty();
  return kind.empty() || kind == "PeerLeft" || kind == "PeerLost" || kind == "CollTimeout";
}

struct HostPlayer : Caller {
  const HostScenario& scenario;
  std::vector<int> sockets{};                  // by rank
  std::shared_ptr<simulation::Mails> mails{};  // or null
  std::shared_ptr<ControlSegment> control{};   // of its host, or null
  std::optional<Ended> proof{};                // of calls that were left early
  std::vector<int64_t> in = std::vector<int64_t>(kMostOnHosts),
                       out = std::vector<int64_t>(kMostOnHosts);

  bool errs(Event event, uint32_t call) const {
    return scenario.event == event && rank == scenario.culprit && call == scenario.at_call;
  }
  static int64_t element(uint32_t rank, uint32_t call, size_t i) {
    return int64_t(rank + 1) * 10'000'000 + call * 10'000 + int64_t(i);
  }
  void fill(uint32_t call, size_t count) {
    simulation::note_write(in.data(), count * 8);
    for (size_t i = 0; i < count; ++i) in[i] = element(rank, call, i);
  }
  void check(uint32_t call, size_t count, const std::function<int64_t(size_t)>& wanted) const {
    simulation::note_read(out.data(), count * 8);
    for (size_t i = 0; i < count; ++i) {
      if (out[i] == wanted(i)) continue;
      wrong("rank ", rank, ", call ", call, ": ", out[i], " at ", i, " instead of ", wanted(i));
    }
  }
  int64_t sum(uint32_t call, size_t i) const {
    int64_t total = 0;
    for (uint32_t r = 0; r < scenario.n; ++r) total += element(r, call, i);
    return total;
  }

  void collective(MessageEngine& engine, uint32_t call) {
    const uint32_t shape = scenario.shapes[call];
    const uint64_t count = scenario.counts[call] + errs(Event::kMismatch, call);
    const hosts::MessagePlan plan = kHostPlans[shape];
    const Binding binding = calls::sum_of(plan(scenario.n, rank), count, 7 + shape);
    const auto limits = hosts::limits_of(plan, scenario.n, scenario.segment, scenario.eager);
    const auto bound = engine.bind(binding, limits, plan == hosts::from_first, {});
    fill(call, count);
    if (errs(Event::kRefusal, call)) {
      rejected_itself = true;
      return engine.refuse("it does not like them");
    }
    if (scenario.background) {
      engine.wait(engine.submit(bound, in.data(), out.data()));
    } else {
      engine.run(*bound, in.data(), out.data());
    }
    const bool from_first = plan == hosts::from_first;
    check(call, count, [&](size_t i) { return from_first ? element(0, call, i) : sum(call, i); });
  }

  std::vector<uint32_t> mates() const {
    std::vector<uint32_t> all;
    for (uint32_t r = 0; r < scenario.n; ++r) {
      if (scenario.host[r] == scenario.host[rank]) all.push_back(r);
    }
    return all;
  }
  uint32_t place() const {
    const auto all = mates();
    return uint32_t(std::find(all.begin(), all.end(), rank) - all.begin());
  }

  // Sums inside the host, between the first ranks of hosts, and back; in slices.
  void in_two_levels(TwoLevelEngine& two, Engine& node, uint32_t call) {
    const uint64_t count = scenario.counts[call] + errs(Event::kMismatch, call);
    const auto m = uint32_t(mates().size()), me = place();
    std::vector<uint32_t> owners;
    for (uint32_t r = 0; r < scenario.n; ++r) {
      const auto before = scenario.host.begin() + r;
      if (std::find(scenario.host.begin(), before, scenario.host[r]) == before) owners.push_back(r);
    }
    const uint64_t slices = std::min<uint64_t>(count, 1 + scenario.shapes[call] * 2);
    const MessageLimits limits{scenario.n, rank, scenario.segment, scenario.eager, 1, scenario.n};
    StagedCall staged;
    staged.scratch_bytes = count * 8;
    for (uint64_t i = 0; i < slices; ++i) {
      const uint64_t low = count * i / slices, high = count * (i + 1) / slices;
      const auto bound = [&](std::shared_ptr<const Plan> plan) {
        Binding binding = calls::sum_of(plan, count, 7);
        binding.in_layout = binding.out_layout = Layout::kTable;
        const size_t entries = size_t{plan->world_size} * plan->chunks;
        const std::vector<uint64_t> offset(entries, low), length(entries, high - low);
        binding.in_table = binding.out_table = {offset, length};
        return binding;
      };
      StagedSlice slice;
      slice.before = {node.bind(bound(plans::one_shot(m, me))), StageArray::kIn,
                      StageArray::kScratch};
      if (me == 0) {
        const auto plan = sum_of_owners(scenario.n, rank, owners);
        slice.across = {two.flat().bind(bound(plan), limits, false, owners), StageArray::kScratch,
                        StageArray::kOut};
      }
      slice.after = {node.bind(bound(plans::from_root(m, me, 0, false))), StageArray::kOut,
                     StageArray::kOut};
      staged.slices.push_back(slice);
    }
    fill(call, count);
    if (errs(Event::kRefusal, call)) {
      rejected_itself = true;
      node.refuse("it does not like them");
      return two.flat().refuse("it does not like them");
    }
    two.run(staged, in.data(), out.data(), 0);
    check(call, count, [&](size_t i) { return sum(call, i); });
  }

  void exchange(MessagePostbox& box, uint32_t call) {
    const uint32_t n = scenario.n, right = (rank + 1) % n, left = (rank + n - 1) % n;
    const size_t count = scenario.counts[call];
    fill(call, count);
    if (call % 2 == 0) {
      const auto coming = box.recv(out.data(), count * 8, 1, int32_t(left), call);
      const auto going = box.send(in.data(), count * 8, 1, right, call);
      if (going != 0) box.wait(going, kTimeout);
      box.wait(coming, kTimeout);
    } else {
      const auto send = [&] { box.send(in.data(), count * 8, 1, right, call, kTimeout); };
      if (rank % 2 == 0) send();
      box.recv(out.data(), count * 8, 1, int32_t(left), call, kTimeout);
      if (rank % 2 != 0) send();
    }
    check(call, count, [&](size_t i) { return element(left, call, i); });
  }

  void play() {
    std::shared_ptr<Transport> api;
    std::shared_ptr<SocketApi> tcp;
    if (scenario.tcp) {
      std::vector<std::string> names;
      for (uint32_t r = 0; r < scenario.n; ++r) names.push_back("rank " + std::to_string(r));
      api = tcp = std::make_shared<SocketApi>(sockets, names, kSilenceS);
    } else {
      api = simulation::join_mpi(mails, rank);
    }
    std::shared_ptr<Engine> node;
    if (control != nullptr) {
      node =
          std::make_shared<Engine>(control, nullptr, place(), EngineOptions{.timeout_s = kTimeout});
    }
    {
      const auto engine = hosts::make_engine(
          api, {.n = scenario.n, .timeout_s = kTimeout, .early = scenario.early}, rank);
      MessagePostbox box(engine);
      std::optional<TwoLevelEngine> two;
      if (node != nullptr) two.emplace(node, engine);
      if (!play_with(*engine, box, two ? &*two : nullptr, node.get())) return;
      if (scenario.early) prove(*engine);
      if (node != nullptr) node->close();
      engine->close();
    }
    if (tcp != nullptr) tcp->close();
  }

  // Ends as a program does that wants to know what has become of its last calls.
  void prove(MessageEngine& engine) {
    proof = Ended{.kind = {}, .text = {}, .entered_ns = simulation::now()};
    try {
      engine.prove();
    } catch (const Error& error) {
      proof->kind = error.kind();
      proof->text = error.what();
    }
    proof->returned_ns = simulation::now();
  }

  // False: the rank ends without closing.
  bool play_with(MessageEngine& engine, MessagePostbox& box, TwoLevelEngine* two, Engine* node) {
    for (uint32_t call = 0; call < scenario.calls; ++call) {
      if (call == scenario.at_call && rank == scenario.culprit) {
        if (scenario.event == Event::kAbort) {
          engine.abort("enough");
          if (node != nullptr) node->abort("enough");
        }
        if (scenario.event == Event::kLeave) {
          engine.leave("it goes");
          if (node != nullptr) node->leave("it goes");
          return false;
        }
      }
      if (scenario.busy && call == scenario.at_call && rank == scenario.second) {
        simulation::sleep_ns(kBusyNs);
      }
      Ended& end = ended.emplace_back();
      end.entered_ns = simulation::now();
      simulation::begin_call();
      try {
        if (scenario.messages && call % 3 == 1) {
          end.collective = false;
          exchange(box, call);
        } else if (two != nullptr) {
          in_two_levels(*two, *node, call);
        } else {
          const bool from_first = kHostPlans[scenario.shapes[call]] == hosts::from_first;
          end.collective = !scenario.early || !from_first;
          collective(engine, call);
        }
      } catch (const Error& error) {
        end.kind = error.kind();
        end.text = error.what();
        if (two != nullptr && end.kind != "PeerRejected") tell(engine, *node, end);
      }
      simulation::end_call(end.kind.empty());
      end.returned_ns = simulation::now();
      if (!end.kind.empty() && end.kind != "PeerRejected") break;
      if (end.kind.empty()) fill(call + 100, scenario.counts[call]);  // the caller's again
    }
    return true;
  }

  // What a session in two levels does: all ranks hear of a failure, and of the first one.
  void tell(MessageEngine& engine, Engine& node, Ended& end) {
    const uint64_t until = simulation::now() + kListenNs;
    while (end.kind == "Revoked" && simulation::now() < until) {
      try {
        engine.poll();
        simulation::sleep_ns(2'000'000);
      } catch (const Error& first) {
        end.kind = first.kind();
        end.text = first.what();
        break;
      }
    }
    engine.raise_on_all(end.kind, end.text);
    if (!node.report().complete) node.abort(end.text);
  }
};

}  // namespace players
