// The engines on a simulated machine (machine.h), from seeds: calls of every kind in shared memory,
// over TCP and MPI and in two levels; deaths, refusals, mismatches and aborts at any access, and
// what survivors do then.
//
//   simulation                      the first 1,000 seeds
//   simulation FIRST COUNT          those from FIRST on
//   simulation one SEED             one of them, in this process, for a debugger
//   simulation weaken PLACE COUNT   the first COUNT with the order of one access taken away
//   simulation mutants COUNT        that for every access that orders others
#include "host_players.h"
#include "players.h"
#include "sockets.h"

namespace {

using namespace players;

constexpr uint64_t kToldOnHostsNs = 1'000'000'000;

Scenario make(std::mt19937_64& random, uint64_t seed) {
  Scenario s;
  s.n = 2 + random() % 3;
  const uint64_t drawn = random() % (std::size(kEvents) + std::size(kMoreEvents));
  s.event = drawn < std::size(kEvents) ? kEvents[drawn] : kMoreEvents[drawn - std::size(kEvents)];
  s.culprit = uint32_t(random() % s.n);
  s.second = (s.culprit + 1 + uint32_t(random() % (s.n - 1))) % s.n;
  s.calls = 1 + random() % 4;
  s.at_call = uint32_t(random() % s.calls);
  s.messages = random() % 3 == 0;
  const bool direct = random() % 4 == 0;  // all of them
  s.posted = s.messages && random() % 2 == 0;
  s.offers = random() % 2 == 0;
  s.background = random() % 4 == 0;
  s.registered = random() % 8 == 0;
  s.start_iteration = random() % 4 == 0 ? 65534 : 2;
  for (uint32_t c = 0; c < s.calls; ++c) {
    s.shapes.push_back(uint32_t(direct ? 6 + random() % 2 : random() % shapes().size()));
    s.counts.push_back(uint32_t(1 + random() % (random() % 4 == 0 ? kMostElements - 1 : 12)));
  }
  s.split = s.event == Event::kDeath && s.n > 2 && !s.messages && seed % 5 == 0;
  return s;
}

void judge(const Scenario& s, const std::vector<Player>& players,
           const std::vector<Thread>& threads) {
  Allowed allowed = {{Event::kNone, {}},
                     {Event::kDeath, {"PeerLost"}},
                     {Event::kTwoDeaths, {"PeerLost"}},
                     {Event::kFreeze, {"CollTimeout", "Revoked"}},  // the latter of a send
                     {Event::kRefusal, {"PeerRejected"}},
                     {Event::kMismatch, {"MismatchError"}},
                     {Event::kAbort, {"Revoked"}},
                     {Event::kLeave, {"PeerLeft"}},
                     {Event::kRefusalAndAbort, {"PeerRejected", "Revoked"}},
                     {Event::kLeaveAndAbort, {"PeerLeft", "Revoked"}}};
  std::vector<const Caller*> callers;
  for (const Player& p : players) {
    callers.push_back(&p);
    const auto phase = Phase(p.control->block(p.rank).phase.load());
    // It died before anybody could know it: its launcher tells the others.
    if (threads[p.rank].dead && phase == Phase::kAbsent) allowed[s.event].insert("CollTimeout");
  }
  judge_calls(s.event, s.culprit, callers, threads, allowed, kToldNs, true);
  for (uint32_t r = 0; r < s.n; ++r) {
    const Player& p = players[r];
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

template <typename Players>
[[noreturn]] void add_to(const Wrong& what, const auto& s, const Players& players) {
  std::ostringstream kinds;
  for (const auto& p : players) {
    kinds << "; rank " << p.rank << ':';
    for (const Ended& e : p.ended) kinds << ' ' << (e.kind.empty() ? "ok" : e.kind);
  }
  wrong(what.what(), "; ", s.n, " ranks, event ", int(s.event), " of rank ", s.culprit, " in call ",
        s.at_call, kinds.str());
}

void simulate_host(uint64_t seed) {
  std::mt19937_64 random(seed);
  const Scenario s = make(random, seed);
  const int control_fd = world::memory_file(), heap_fd = world::memory_file();
  const int part_fd = world::memory_file();
  const Geometry geometry{s.n, kCellBytes, kMailboxBytes, s.start_iteration};
  // One mapping for all ranks: the machine knows memory by its address.
  const auto control = ControlSegment::open(control_fd, geometry);
  const auto heap = std::make_shared<Heap>(heap_fd, s.n, kRegionBytes);
  const Geometry of_part{s.n - 1, kCellBytes, kMailboxBytes, 2};
  const auto part = s.split ? ControlSegment::open(part_fd, of_part) : nullptr;
  std::vector<Player> players;
  const auto array = [&](uint32_t rank) {
    return reinterpret_cast<int64_t*>(heap->at(heap->alloc(rank, kMostElements * 80)));
  };
  for (uint32_t r = 0; r < s.n; ++r) {
    players.push_back({{r, {}}, s, control, heap, array(r), array(r)});
    Player& p = players.back();
    p.part = part;
    if (!s.registered) continue;
    p.own_in = std::make_shared<Registered>(heap, r, true);
    p.own_out = std::make_shared<Registered>(heap, r, false);
    p.in = reinterpret_cast<int64_t*>(p.own_in->user);
    p.out = reinterpret_cast<int64_t*>(p.own_out->user);
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
    options.long_sleeps = s.event == Event::kNone || s.event == Event::kRefusal;
    options.shared = {{heap->at(0), heap->bytes()},
                      {&control->abort_block(), ControlSegment::bytes(geometry) - kPage}};
    if (s.split) {
      options.shared.push_back({&part->abort_block(), ControlSegment::bytes(of_part) - kPage});
    }
    simulation::run(threads, options);
    judge(s, players, threads);
  } catch (const Wrong& what) {
    add_to(Wrong(what.what() + ("; shapes" + shapes_of(s))), s, players);
  }
  close(control_fd);
  close(heap_fd);
  close(part_fd);
}

HostScenario make_hosts(std::mt19937_64& random, uint64_t seed) {
  HostScenario s;
  s.n = 2 + random() % 3;
  constexpr Event kMore[] = {Event::kCut, Event::kSilence};
  s.tcp = random() % 3 != 0;
  const uint64_t events = std::size(kEvents) + (s.tcp ? std::size(kMore) : 0);
  const uint64_t drawn = random() % events;
  s.event = drawn < std::size(kEvents) ? kEvents[drawn] : kMore[drawn - std::size(kEvents)];
  s.culprit = uint32_t(random() % s.n);
  s.second = (s.culprit + 1 + uint32_t(random() % (s.n - 1))) % s.n;
  s.calls = 1 + random() % 4;
  s.at_call = uint32_t(random() % s.calls);
  if (random() % 3 == 0) {  // two hosts, in two levels
    s.host.assign(s.n, 1);
    for (uint32_t r = 0; r < 1 + random() % (s.n - 1); ++r) s.host[r] = 0;
  }
  s.messages = random() % 3 == 0;
  s.background = s.host.empty() && random() % 3 == 0;
  s.segment = 128u << random() % 4;
  s.eager = random() % 2 == 0 ? 0 : 256;
  for (uint32_t c = 0; c < s.calls; ++c) {
    s.shapes.push_back(uint32_t(random() % std::size(kHostPlans)));
    const bool large = s.messages && c % 3 == 1 && random() % 2 == 0;  // than a packet
    s.counts.push_back(uint32_t(large ? kMostOnHosts : 1 + random() % 100));
  }
  s.busy = s.event == Event::kDeath && s.host.empty() && seed % 10 == 7;
  s.early = s.host.empty() && seed % 3 == 1;
  return s;
}

// Who has left calls early hears what has become of them, at the latest as it ends.
void judge_early(const HostScenario& s, const HostPlayer& p, const std::set<std::string>& allowed) {
  bool told = p.proof && !p.proof->kind.empty();
  for (const Ended& end : p.ended) told = told || !end.kind.empty();
  const bool happens = s.event == Event::kMismatch && !(s.messages && s.at_call % 3 == 1);
  if (happens && !told) wrong("rank ", p.rank, " hears of no mismatch");
  if (!p.proof || allowed.count(p.proof->kind) != 0 || ends_well(s.event, p.proof->kind)) return;
  wrong("rank ", p.rank, " hears of its last calls: ", p.proof->kind, ": ", p.proof->text);
}

void judge_hosts(const HostScenario& s, const std::vector<HostPlayer>& players,
                 const std::vector<Thread>& threads) {
  Allowed allowed = {{Event::kNone, {}},
                     {Event::kDeath, {"PeerLost"}},
                     {Event::kTwoDeaths, {"PeerLost"}},
                     {Event::kCut, {"PeerLost"}},
                     {Event::kSilence, {"PeerLost"}},
                     {Event::kFreeze, {"CollTimeout", "Revoked"}},
                     {Event::kRefusal, {"PeerRejected"}},
                     {Event::kMismatch, {"MismatchError"}},
                     {Event::kAbort, {"Revoked"}},
                     {Event::kLeave, {"PeerLeft"}}};
  if (s.early) allowed[Event::kRefusal].insert("MismatchError");
  std::vector<const Caller*> callers;
  for (const HostPlayer& p : players) {
    callers.push_back(&p);
    if (s.early && threads[p.rank].finished) judge_early(s, p, allowed.at(s.event));
    const bool absent =
        p.control != nullptr && Phase(p.control->block(p.place()).phase.load()) == Phase::kAbsent;
    if (threads[p.rank].dead && absent) allowed[s.event].insert("CollTimeout");  // as on one host
  }
  judge_calls(s.event, s.culprit, callers, threads, allowed, kToldOnHostsNs,
              s.host.empty());  // inside a host ranks have other numbers
}

void simulate_hosts(uint64_t seed) {
  std::mt19937_64 random(seed);
  const HostScenario s = make_hosts(random, seed);
  std::vector<HostPlayer> players;
  simulation::Options options;
  options.seed = seed;
  std::vector<int> files;
  std::map<uint32_t, std::shared_ptr<ControlSegment>> controls;
  for (uint32_t r = 0; r < s.n; ++r) players.push_back({{r, {}}, s});
  for (HostPlayer& p : players) {
    if (s.host.empty()) continue;
    std::shared_ptr<ControlSegment>& control = controls[s.host[p.rank]];
    if (control == nullptr) {
      const Geometry geometry{uint32_t(p.mates().size()), kCellBytes, kMailboxBytes, 2};
      files.push_back(world::memory_file());
      control = ControlSegment::open(files.back(), geometry);
      options.shared.push_back({&control->abort_block(), ControlSegment::bytes(geometry) - kPage});
    }
    p.control = control;
  }
  std::vector<Thread> threads(s.n);
  for (HostPlayer& p : players) {
    threads[p.rank].body = [&p] { p.play(); };
    options.shared.push_back({p.in.data(), p.in.size() * 8});
    options.shared.push_back({p.out.data(), p.out.size() * 8});
  }
  const uint64_t at = random() % (random() % 2 == 0 ? 1000 : 10'000);
  if (s.event == Event::kDeath || s.event == Event::kTwoDeaths) threads[s.culprit].kill_at = at;
  if (s.event == Event::kTwoDeaths) threads[s.second].kill_at = at + random() % 2000;
  if (s.event == Event::kFreeze) threads[s.culprit].freeze_at = at;
  options.begin = [&] {
    if (!s.tcp) {
      const auto mails = simulation::make_mails();
      for (HostPlayer& p : players) p.mails = mails;
      return;
    }
    for (HostPlayer& p : players) p.sockets.assign(s.n, -1);
    for (uint32_t a = 0; a < s.n; ++a) {
      for (uint32_t b = a + 1; b < s.n; ++b) {
        const auto [of_a, of_b] = simulation::make_connection(a, b);
        players[a].sockets[b] = of_a;
        players[b].sockets[a] = of_b;
      }
    }
    const int fd = players[s.culprit].sockets[s.second];
    if (s.event == Event::kCut) simulation::cut(fd, simulation::now() + at * 1000);
    if (s.event == Event::kSilence) simulation::mute(fd, simulation::now() + at * 1000);
  };
  try {
    simulation::run(threads, options);
    judge_hosts(s, players, threads);
  } catch (const Wrong& what) {
    add_to(Wrong(what.what() + std::string(s.tcp ? "; TCP" : "; MPI") +
                 (s.host.empty() ? "" : ", two levels")),
           s, players);
  }
  for (const int file : files) close(file);
}

// One seed of two is of one host.
void simulate(uint64_t seed) { seed % 2 == 0 ? simulate_host(seed) : simulate_hosts(seed); }

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
