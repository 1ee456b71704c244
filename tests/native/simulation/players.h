// What the ranks of a simulated job do: their arrays, calls, and how these end.
#pragma once

#include "calls.h"
#include "engine/survivors.h"
#include "machine.h"
#include "p2p/mailbox.h"

namespace players {

using namespace pycoll;
using simulation::Thread;
using simulation::Wrong;

constexpr uint64_t kToldNs = 50'000'000;  // within which survivors hear of a death
constexpr uint32_t kMostElements = 100;
constexpr uint64_t kCellBytes = 512, kMailboxBytes = 1024, kRegionBytes = 64 << 10;
constexpr double kTimeout = 2;

enum class Event { kNone, kDeath, kTwoDeaths, kFreeze, kRefusal, kMismatch, kAbort, kLeave };
constexpr Event kEvents[] = {Event::kNone,      Event::kNone,   Event::kDeath,   Event::kDeath,
                             Event::kTwoDeaths, Event::kFreeze, Event::kRefusal, Event::kMismatch,
                             Event::kAbort,     Event::kLeave};

// How a call of a rank ended.
struct Ended {
  std::string kind, text;  // of its error
  uint64_t entered_ns = 0, returned_ns = 0;
};

struct Scenario {
  uint32_t n;
  Event event;
  uint32_t culprit, second, calls, at_call;
  bool messages;
  uint32_t direct;  // of ten calls, so many
  uint64_t start_iteration;
  std::vector<uint32_t> shapes, counts;
};

template <typename... Parts>
[[noreturn]] void wrong(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Wrong(text.str());
}

using Plans = std::function<std::shared_ptr<const Plan>(uint32_t, uint32_t)>;
struct Shape {
  Plans plan;
  bool direct, own_in, own_out;  // a rank has only its chunk of the input, or of the output
  bool sums;
};

inline const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {[](uint32_t n, uint32_t r) { return plans::one_shot(n, r); }, false, false, false, true},
      {plans::ring, false, false, false, true},
      {plans::scatter_sum, false, false, true, true},
      {plans::collect, false, true, false, false},
      {[](uint32_t n, uint32_t r) { return plans::from_root(n, r, n - 1, false); }, false, false,
       false, false},
      {[](uint32_t n, uint32_t r) { return plans::from_root(n, r, 0, true); }, false, false, false,
       false},
      {plans::two_shot_direct, true, false, false, true},
      {plans::collect_direct, true, true, false, false},
  };
  return all;
}

inline int64_t element(uint32_t rank, uint32_t call, size_t i) {
  return int64_t(rank + 1) * 1'000'000 + call * 1000 + int64_t(i);
}

// What a shape leaves at place i of the whole result, of `chunk` elements a rank.
inline int64_t expected(uint32_t shape, uint32_t n, uint32_t call, size_t i, size_t chunk) {
  if (shape == 4) return element(n - 1, call, i);
  if (shape == 5) return element(0, call, i);
  if (shapes()[shape].own_in) return element(uint32_t(i / chunk), call, i);
  int64_t sum = 0;
  for (uint32_t r = 0; r < n; ++r) sum += element(r, call, i);
  return sum;
}

// One rank: arrays, calls, and how they end.
struct Player {
  const Scenario& scenario;
  uint32_t rank;
  std::shared_ptr<ControlSegment> control;
  std::shared_ptr<Heap> heap;
  int64_t *in, *out;
  std::vector<Ended> ended;
  std::vector<uint32_t> left;  // the survivors that it has joined, in
  uint64_t round = 0;
  bool rejected_itself = false;

  void fill(int64_t* in, uint32_t call, size_t from, size_t count) const {
    simulation::note_write(in, count * 8);
    for (size_t i = 0; i < count; ++i) in[i] = element(rank, call, from + i);
  }

  void collective(Engine& engine, uint32_t call) {
    const uint32_t shape = scenario.shapes[call], n = scenario.n;
    const Shape& s = shapes()[shape];
    uint64_t count = scenario.counts[call];
    if (scenario.event == Event::kMismatch && rank == scenario.culprit &&
        call == scenario.at_call) {
      ++count;
    }
    Binding binding = calls::sum_of(s.plan(n, rank), count, 7 + shape);
    const uint64_t chunk = binding.chunk;
    const uint64_t first = std::min(count, rank * chunk);
    const uint64_t own = std::min(chunk, count - first);
    if (s.own_in) binding.in_layout = Layout::kOwn;
    if (s.own_out) binding.out_layout = Layout::kOwn;
    const auto bound = engine.bind(binding);
    fill(in, call, s.own_in ? first : 0, s.own_in ? own : count);
    if (scenario.event == Event::kRefusal && rank == scenario.culprit && call == scenario.at_call) {
      rejected_itself = true;
      return engine.refuse("it does not like them");
    }
    engine.run(*bound, in, out);
    const uint64_t from = s.own_out ? first : 0, size = s.own_out ? own : count;
    simulation::note_read(out, size * 8);
    for (uint64_t i = 0; i < size; ++i) {
      const int64_t want = expected(shape, n, call, from + i, chunk);
      if (out[i] != want) {
        wrong("rank ", rank, ", call ", call, " of shape ", shape, ": ", out[i], " at ", i,
              " instead of ", want);
      }
    }
  }

  // Everybody sends to the right and receives from the left.
  void exchange(Mailboxes& boxes, uint32_t call) {
    const uint32_t n = scenario.n, right = (rank + 1) % n, left = (rank + n - 1) % n;
    const size_t count = scenario.counts[call] * (call % 2 == 0 ? 1 : 10);
    fill(in, call, 0, count);
    const auto send = [&] { boxes.send(in, count * 8, 1, right, call, kTimeout); };
    const auto receive = [&] { boxes.recv(out, count * 8, 1, int32_t(left), call, kTimeout); };
    if (rank % 2 == 0) send();
    receive();
    if (rank % 2 != 0) send();
    simulation::note_read(out, count * 8);
    for (size_t i = 0; i < count; ++i) {
      if (out[i] != element(left, call, i)) wrong("rank ", rank, ": a message of other bytes");
    }
  }

  void play() {
    Engine engine(control, heap, rank, {.timeout_s = kTimeout});
    Mailboxes boxes(std::shared_ptr<Engine>(&engine, [](Engine*) {}));
    for (uint32_t call = 0; call < scenario.calls; ++call) {
      if (call == scenario.at_call && rank == scenario.culprit) {
        if (scenario.event == Event::kAbort) engine.abort("enough");
        if (scenario.event == Event::kLeave) return engine.leave("it goes");
      }
      Ended& end = ended.emplace_back();
      end.entered_ns = simulation::now();
      simulation::begin_call();
      try {
        if (scenario.messages && call % 3 == 1) {
          exchange(boxes, call);
        } else {
          collective(engine, call);
        }
      } catch (const Error& error) {
        end.kind = error.kind();
        end.text = error.what();
      }
      simulation::end_call(end.kind.empty());
      end.returned_ns = simulation::now();
      if (!end.kind.empty()) look_at_report(engine);
      // The arrays are the caller's again. Where a rank has stopped they are not: it may go on.
      if (scenario.event != Event::kFreeze) {
        fill(in, call + 100, 0, size_t{kMostElements});
        simulation::note_write(out, kMostElements * 8);
      }
      if (!end.kind.empty() && end.kind != "PeerRejected") break;
    }
    if (!ended.empty() && ended.back().kind == "PeerLost") count_survivors();
    engine.close();
  }

  // What the runtime reads to write the text of an error.
  void look_at_report(Engine& engine) {
    if (!engine.report().complete) return;
    simulation::note_read(control->abort_block().text, 8);
    for (uint32_t r = 0; r < scenario.n; ++r) simulation::note_read(control->report(r).text, 8);
  }

  void count_survivors() {
    Survivors survivors(control, rank, false);
    const uint64_t until = simulation::now() + 5'000'000'000;
    for (;;) {
      const auto check = [&](Pulse) {
        if (simulation::now() > until) {
          std::ostringstream missing;
          for (const uint32_t r : survivors.missing()) {
            // It died before it had a slot, which its launcher would tell.
            if (Phase(control->block(r).phase.load()) == Phase::kAbsent) return true;
            missing << ' ' << r;
          }
          wrong("rank ", rank, " does not agree who is left; waits for", missing.str(), "; event ",
                int(scenario.event), " of ", scenario.culprit, ' ', scenario.second);
        }
        return false;
      };
      left = survivors.agree(-1, check);
      round = control->block(rank).came.load();
      if (left.empty() || survivors.join(check) == Round::kJoined) return;
    }
  }
};

}  // namespace players
