// The engine on a simulated machine (machine.h), from seeds: calls of every kind, deaths, refusals,
// mismatches and aborts at any access, and what survivors do then.
//
//   simulation                      the first 1,000 seeds
//   simulation FIRST COUNT          those from FIRST on
//   simulation one SEED             one of them, in this process, for a debugger
//   simulation weaken PLACE COUNT   the first COUNT with the order of one access taken away
//   simulation mutants COUNT        that for every access that orders others
#include <sys/wait.h>

#include <set>

#include "players.h"

namespace {

using namespace players;

Scenario make(std::mt19937_64& random) {
  Scenario s;
  s.n = 2 + random() % 3;
  s.event = kEvents[random() % std::size(kEvents)];
  s.culprit = uint32_t(random() % s.n);
  s.second = (s.culprit + 1 + uint32_t(random() % (s.n - 1))) % s.n;
  s.calls = 1 + random() % 4;
  s.at_call = uint32_t(random() % s.calls);
  s.messages = random() % 3 == 0;
  s.start_iteration = random() % 4 == 0 ? 65534 : 2;
  for (uint32_t c = 0; c < s.calls; ++c) {
    s.shapes.push_back(uint32_t(random() % shapes().size()));
    s.counts.push_back(uint32_t(1 + random() % (random() % 4 == 0 ? kMostElements - 1 : 12)));
  }
  return s;
}

void judge(const Scenario& s, const std::vector<Player>& players,
           const std::vector<Thread>& threads) {
  std::map<Event, std::set<std::string>> allowed = {
      {Event::kNone, {}},
      {Event::kDeath, {"PeerLost"}},
      {Event::kTwoDeaths, {"PeerLost"}},
      {Event::kFreeze, {"CollTimeout", "Revoked"}},  // the latter of a send
      {Event::kRefusal, {"PeerRejected"}},
      {Event::kMismatch, {"MismatchError"}},
      {Event::kAbort, {"Revoked"}},
      {Event::kLeave, {"PeerLeft"}}};
  uint64_t gone_ns = UINT64_MAX, last_gone_ns = 0;
  for (const Thread& t : threads) {
    if (t.finished) continue;
    gone_ns = std::min(gone_ns, t.died_ns);
    last_gone_ns = std::max(last_gone_ns, t.died_ns);
  }
  for (const Player& p : players) {
    const auto phase = Phase(p.control->block(p.rank).phase.load());
    // It died before anybody could know it: its launcher tells the others.
    if (threads[p.rank].dead && phase == Phase::kAbsent) allowed[s.event].insert("CollTimeout");
  }
  for (uint32_t r = 0; r < s.n; ++r) {
    const Player& p = players[r];
    for (uint32_t call = 0; call < p.ended.size(); ++call) {
      const Ended& end = p.ended[call];
      const bool over = threads[r].finished || call + 1 < p.ended.size();
      if (!over) continue;
      // One that closes while others are in the call after its last error is heard of as left.
      const bool late = end.kind == "PeerLeft" && s.event != Event::kNone;
      if (!end.kind.empty() && !late && !allowed[s.event].count(end.kind)) {
        wrong("rank ", r, ", call ", call, ", event ", int(s.event), " of rank ", s.culprit, ": ",
              end.kind, ": ", end.text);
      }
      if (end.kind == "PeerLost" &&
          end.returned_ns > std::max(end.entered_ns, last_gone_ns) + kToldNs) {
        wrong("rank ", r, " hears of a death after ",
              (end.returned_ns - std::max(end.entered_ns, last_gone_ns)) / 1000, " us");
      }
      if (!end.kind.empty() || (s.messages && call % 3 == 1) || p.rejected_itself) continue;
      for (const Player& other : players) {  // nobody returns before all have entered
        if (other.ended.size() <= call || other.ended[call].entered_ns > end.returned_ns) {
          wrong("rank ", r, " returns from call ", call, " before rank ", other.rank, " enters");
        }
      }
    }
    for (const Player& other : players) {
      const bool both = threads[r].finished && threads[other.rank].finished;
      if (both && p.round == other.round && p.left != other.left) {
        wrong("ranks ", r, " and ", other.rank, " count others in round ", p.round);
      }
    }
    if (!p.left.empty() && s.event == Event::kDeath) {
      for (uint32_t q = 0; q < s.n; ++q) {
        const bool counts = std::count(p.left.begin(), p.left.end(), q) != 0;
        if (threads[q].dead && counts) wrong("rank ", r, " counts rank ", q, ", which is dead");
      }
    }
  }
}

std::string shapes_of(const Scenario& s) {
  std::string text;
  for (uint32_t c = 0; c < s.calls; ++c) {
    text += s.messages && c % 3 == 1 ? " messages" : ' ' + std::to_string(s.shapes[c]);
  }
  return text;
}

void simulate(uint64_t seed) {
  std::mt19937_64 random(seed);
  const Scenario s = make(random);
  const int control_fd = world::memory_file(), heap_fd = world::memory_file();
  const Geometry geometry{s.n, kCellBytes, kMailboxBytes, s.start_iteration};
  // One mapping for all ranks: the machine knows memory by its address.
  const auto control = ControlSegment::open(control_fd, geometry);
  const auto heap = std::make_shared<Heap>(heap_fd, s.n, kRegionBytes);
  std::vector<Player> players;
  const auto array = [&](uint32_t rank) {
    return reinterpret_cast<int64_t*>(heap->at(heap->alloc(rank, kMostElements * 80)));
  };
  for (uint32_t r = 0; r < s.n; ++r) {
    players.push_back({s, r, control, heap, array(r), array(r), {}, {}});
  }
  std::vector<Thread> threads(s.n);
  for (Player& p : players) threads[p.rank].body = [&p] { p.play(); };
  const uint64_t at = random() % (random() % 2 == 0 ? 400 : 4000);
  if (s.event == Event::kDeath || s.event == Event::kTwoDeaths) threads[s.culprit].kill_at = at;
  if (s.event == Event::kTwoDeaths) threads[s.second].kill_at = at + random() % 2000;
  if (s.event == Event::kFreeze) threads[s.culprit].freeze_at = at;
  try {
    simulation::Options options;
    options.seed = seed;
    options.shared = {{heap->at(0), heap->bytes()},
                      {&control->abort_block(), ControlSegment::bytes(geometry) - kPage}};
    simulation::run(threads, options);
    judge(s, players, threads);
  } catch (const Wrong& what) {
    std::ostringstream kinds;
    for (const Player& p : players) {
      kinds << "; rank " << p.rank << ':';
      for (const Ended& e : p.ended) kinds << ' ' << (e.kind.empty() ? "ok" : e.kind);
    }
    wrong(what.what(), "; ", s.n, " ranks, event ", int(s.event), " of rank ", s.culprit,
          " in call ", s.at_call, kinds.str(), "; shapes", shapes_of(s));
  }
  close(control_fd);
  close(heap_fd);
}

// Runs seeds in a child, which a crash ends too; returns the first seed that is wrong, or -1.
int64_t first_wrong(uint64_t first, uint64_t count, std::string& text) {
  constexpr uint64_t kBatch = 500;
  for (uint64_t from = first; from < first + count; from += kBatch) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      for (uint64_t seed = from; seed < std::min(from + kBatch, first + count); ++seed) {
        dprintf(ends[1], "%lu\n", seed);
        try {
          simulate(seed);
        } catch (const std::exception& error) {
          dprintf(ends[1], "%s\n", error.what());
          _exit(1);
        }
      }
      _exit(0);
    }
    close(ends[1]);
    FILE* lines = fdopen(ends[0], "r");
    char line[1024];
    uint64_t seed = from;
    text = "it crashes";
    while (std::fgets(line, sizeof(line), lines) != nullptr) {
      char* end = nullptr;
      const uint64_t number = std::strtoul(line, &end, 10);
      if (*end == '\n' && end != line) {
        seed = number;
        text = "it crashes";
      } else {
        text = std::string(line, std::strcspn(line, "\n"));
      }
    }
    std::fclose(lines);
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return int64_t(seed);
  }
  return -1;
}

int check(uint64_t first, uint64_t count) {
  std::string text;
  const int64_t seed = first_wrong(first, count, text);
  if (seed < 0) {
    std::printf("ok    %lu seeds from %lu\n", count, first);
    return 0;
  }
  std::printf("FAIL  seed %ld: %s\n", seed, text.c_str());
  return 1;
}

int weaken(const std::string& place, uint64_t count) {
  simulation::weaken(place);
  std::string text;
  const int64_t seed = first_wrong(0, count, text);
  std::printf("%-40s %s\n", place.c_str(),
              seed < 0 ? "survives" : ("seed " + std::to_string(seed) + ": " + text).c_str());
  std::fflush(stdout);
  return seed >= 0;
}

int mutants(uint64_t count) {
  for (uint64_t seed = 0; seed < 400; ++seed) simulate(seed);
  const auto places = simulation::ordered_places();
  size_t found = 0;
  for (const std::string& place : places) found += size_t(weaken(place, count));
  std::printf("%zu of %zu found\n", found, places.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "0";
  const auto number = [&](int i, uint64_t other) {
    return argc > i ? std::strtoull(argv[i], nullptr, 10) : other;
  };
  if (first == "mutants") return mutants(number(2, 2000));
  if (first == "weaken") return weaken(argc > 2 ? argv[2] : "", number(3, 2000)) == 0;
  if (first == "one") return simulate(number(2, 0)), 0;
  return check(number(1, 0), number(2, 1000));
}
