// What the ranks of a simulated job do: their arrays, calls, and how these end.
#pragma once

#include "callers.h"
#include "calls.h"
#include "engine/survivors.h"
#include "memory/registration.h"
#include "p2p/postbox.h"

namespace players {

constexpr uint64_t kToldNs = 50'000'000;  // within which survivors hear of a death
// What a session waits before those who count survivors end what was split from their communicator.
constexpr uint64_t kPatienceNs = 200'000'000;
constexpr uint32_t kMostElements = 100;
constexpr uint64_t kCellBytes = 512, kMailboxBytes = 1024, kRegionBytes = 64 << 10;

constexpr Event kEvents[] = {Event::kNone,      Event::kNone,   Event::kDeath,   Event::kDeath,
                             Event::kTwoDeaths, Event::kFreeze, Event::kRefusal, Event::kMismatch,
                             Event::kAbort,     Event::kLeave};
constexpr Event kMoreEvents[] = {Event::kRefusalAndAbort, Event::kLeaveAndAbort};

struct Scenario {
  uint32_t n;
  Event event;
  uint32_t culprit, second, calls, at_call;
  bool messages;
  bool posted, offers, background, registered;
  bool split;  // all but the culprit have a part of their own, in which `second` waits for them
  uint64_t start_iteration;
  std::vector<uint32_t> shapes, counts;
};

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

// An array of a rank in memory of its own, of which the whole pages are the heap's: what calls use
// begins, or ends, outside of these.
struct Registered {
  explicit Registered(std::shared_ptr<Heap> heap, uint32_t rank, bool at_head) : moved(heap) {
    constexpr size_t kBytes = kMostElements * 8, kEdge = 17 * 8;
    void* place =
        mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* first = static_cast<char*>(place) + (at_head ? kPage - kEdge : kPage);
    moved.move_in(rank, first, kPage + kBytes);
    user = at_head ? first : first + kPage - kEdge;
    heap_address = moved.heap_address() + (user - first);
  }
  void note(size_t count) const { simulation::note_write(heap_address, count * 8); }
  void detour(std::vector<Detours::Copy>& copies, size_t count, bool to_heap) const {
    moved.edges(user, count * 8, [&](char* own, char* there, size_t nbytes) {
      copies.push_back(to_heap ? Detours::Copy{there, own, nbytes}
                               : Detours::Copy{own, there, nbytes});
    });
  }

  Registration moved;
  char *user = nullptr, *heap_address = nullptr;
};

// One rank: arrays, calls, and how they end.
struct Player : Caller {
  const Scenario& scenario;
  std::shared_ptr<ControlSegment> control;
  std::shared_ptr<Heap> heap;
  int64_t *in, *out;  // as the program sees them
  std::shared_ptr<Registered> own_in{}, own_out{};
  std::shared_ptr<ControlSegment> part{};  // of a split, or null
  Engine* child = nullptr;                 // there, while it plays
  std::vector<uint32_t> left{};            // the survivors that it has joined, in
  uint64_t round = 0;

  bool errs(Event event, uint32_t call, Event other = Event::kCut) const {
    return (scenario.event == event || scenario.event == other) && rank == scenario.culprit &&
           call == scenario.at_call;
  }

  void fill(int64_t* in, uint32_t call, size_t from, size_t count) const {
    simulation::note_write(place_of(in), count * 8);
    for (size_t i = 0; i < count; ++i) in[i] = element(rank, call, from + i);
  }

  // Where the engine finds an array.
  int64_t* place_of(int64_t* array) const {
    if (own_in == nullptr) return array;
    const Registered& own = array == in ? *own_in : *own_out;
    return reinterpret_cast<int64_t*>(own.heap_address);
  }

  void collective(Engine& engine, uint32_t call) {
    const uint32_t shape = scenario.shapes[call], n = scenario.n;
    const Shape& s = shapes()[shape];
    uint64_t count = scenario.counts[call];
    if (errs(Event::kMismatch, call)) ++count;
    Binding binding = calls::sum_of(s.plan(n, rank), count, 7 + shape);
    const uint64_t chunk = binding.chunk;
    const uint64_t first = std::min(count, rank * chunk);
    const uint64_t own = std::min(chunk, count - first);
    if (s.own_in) binding.in_layout = Layout::kOwn;
    if (s.own_out) binding.out_layout = Layout::kOwn;
    const auto bound = engine.bind(binding);
    fill(in, call, s.own_in ? first : 0, s.own_in ? own : count);
    if (errs(Event::kRefusal, call, Event::kRefusalAndAbort)) {
      rejected_itself = true;
      return engine.refuse("it does not like them");
    }
    const uint32_t site = engine.site("call " + std::to_string(call));
    int64_t *source = in, *target = out;
    std::shared_ptr<Detours> detours;
    if (s.direct && own_in != nullptr) {
      source = place_of(in);
      target = place_of(out);
      detours = std::make_shared<Detours>();
      own_in->detour(detours->before, s.own_in ? own : count, true);
      own_out->detour(detours->after, s.own_out ? own : count, false);
    }
    if (scenario.background) {
      engine.wait(engine.submit(bound, source, target, site, Engine::kDefaultTimeout, detours));
    } else {
      engine.run(*bound, source, target, site, Engine::kDefaultTimeout, detours);
    }
    const uint64_t from = s.own_out ? first : 0, size = s.own_out ? own : count;
    simulation::note_read(place_of(out), size * 8);
    for (uint64_t i = 0; i < size; ++i) {
      const int64_t want = expected(shape, n, call, from + i, chunk);
      if (out[i] != want) {
        wrong("rank ", rank, ", call ", call, " of shape ", shape, ": ", out[i], " at ", i,
              " instead of ", want);
      }
    }
  }

  // Everybody sends to the right and receives from the left.
  void exchange(Postbox& postbox, uint32_t call) {
    const uint32_t n = scenario.n, right = (rank + 1) % n, left = (rank + n - 1) % n;
    const size_t count =
        std::min<size_t>(kMostElements, scenario.counts[call] * (call % 2 == 0 ? 1 : 10));
    fill(in, call, 0, count);
    const auto send = [&] {
      const Postbox::Ticket going = postbox.send(in, count * 8, 1, right, call);
      if (going != 0) postbox.finish_send(going, kTimeout);
    };
    if (scenario.posted) {
      const Postbox::Ticket coming = postbox.recv(out, count * 8, 1, int32_t(left), call);
      try {
        send();
        postbox.wait(coming, kTimeout);
      } catch (const Error&) {
        postbox.forget(coming);
        throw;
      }
    } else {
      const auto receive = [&] { postbox.take(out, count * 8, 1, int32_t(left), call, kTimeout); };
      if (rank % 2 == 0) send();
      receive();
      if (rank % 2 != 0) send();
    }
    simulation::note_read(place_of(out), count * 8);
    for (size_t i = 0; i < count; ++i) {
      if (out[i] != element(left, call, i)) wrong("rank ", rank, ": a message of other bytes");
    }
  }

  // A call in the part, which the others do not make: they have heard of a death outside of it.
  void wait_in_part() {
    const uint32_t m = scenario.n - 1, place = rank - (rank > scenario.culprit);
    const auto bound = child->bind(calls::sum_of(plans::one_shot(m, place), 5, 99));
    std::string kind = "no error";
    try {
      child->run(*bound, in, out);
    } catch (const Error& error) {
      kind = error.kind();
    }
    // It died before it had a slot, which its launcher would tell.
    const bool unknown = Phase(control->block(scenario.culprit).phase.load()) == Phase::kAbsent;
    if (kind != "Revoked" && !unknown) {
      wrong("rank ", rank, ", in a part that the others have left: ", kind);
    }
  }

  void play() {
    std::optional<Engine> in_part;
    if (part != nullptr && rank != scenario.culprit) {
      const uint32_t place = rank - (rank > scenario.culprit);
      child = &in_part.emplace(part, nullptr, place, EngineOptions{.timeout_s = kTimeout});
    }
    Engine engine(control, heap, rank, {.timeout_s = kTimeout});
    const std::shared_ptr<Engine> shared(&engine, [](Engine*) {});
    Postbox postbox(shared, scenario.offers ? Offers::kAlways : Offers::kNever);
    for (uint32_t call = 0; call < scenario.calls; ++call) {
      if (errs(Event::kAbort, call)) engine.abort("enough");
      if (errs(Event::kLeave, call, Event::kLeaveAndAbort)) return engine.leave("it goes");
      if (scenario.split && call == scenario.at_call) {
        while (rank == scenario.culprit) simulation::sleep_ns(100'000);  // until it dies
        if (rank == scenario.second) break;
      }
      const bool both =
          scenario.event == Event::kRefusalAndAbort || scenario.event == Event::kLeaveAndAbort;
      if (both && rank == scenario.second && call == scenario.at_call) engine.abort("enough");
      Ended& end = ended.emplace_back();
      end.entered_ns = simulation::now();
      simulation::begin_call();
      try {
        if (scenario.messages && call % 3 == 1) {
          end.collective = false;
          exchange(postbox, call);
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
        simulation::note_write(place_of(out), kMostElements * 8);
      }
      if (!end.kind.empty() && end.kind != "PeerRejected") break;
    }
    postbox.close();
    const bool lost = !ended.empty() && ended.back().kind == "PeerLost";
    const bool waits = !lost && scenario.split && rank == scenario.second;
    if (waits) wait_in_part();
    if (lost || waits) count_survivors();
    if (child != nullptr) child->close();
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
    const uint64_t patient_until = simulation::now() + kPatienceNs;
    uint32_t attempts = 0;
    for (;;) {
      const auto check = [&](Pulse) {
        if (child != nullptr && simulation::now() > patient_until)
          child->abort("others count survivors");
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
      left = survivors.agree(int(100 * rank + ++attempts), check);
      round = control->block(rank).came.load();
      std::vector<int32_t> offers;
      for (const uint32_t r : left) offers.push_back(survivors.offer_of(r));
      if (left.empty()) return;
      if (survivors.join(check) != Round::kJoined) continue;  // who knows it offers anew
      for (size_t i = 0; i < left.size(); ++i) {
        if (offers[i] == int32_t(100 * left[i] + round)) continue;
        wrong("rank ", rank, " finds offer ", offers[i], " of rank ", left[i], " in round ", round);
      }
      return;
    }
  }
};

}  // namespace players
