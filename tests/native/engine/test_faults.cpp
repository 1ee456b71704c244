// How the engine fails: the right error on every rank, soon, and usable afterwards where promised.
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "calls.h"

namespace {

using namespace calls;

constexpr uint64_t kSecond = 1'000'000'000;

// What: which call the odd rank makes. Every rank must raise, within a second, and know who called
// what and from where; and raise again at the next call.
void mismatch(Mode mode, uint32_t n, uint64_t odd_descriptor, uint64_t odd_count) {
  expect_all_fine(
      run(mode, {.n = n},
          [=](const Rank& me) {
            for (int i = 0; i < 10; ++i) add_ones(me);
            const bool odd = me.rank == n - 1;
            const uint32_t site = me.engine.site(odd ? "odd.py:2 f" : "main.py:1 g");
            const auto call = me.engine.bind(
                sum_of(one_shot(n, me.rank), odd ? odd_count : 50, odd ? odd_descriptor : 0x101));
            Ints x(5000), y(5000);
            const uint64_t start = now_ns();
            expect_kind(
                "MismatchError", [&] { me.engine.run(*call, x.data(), y.data(), site); }, "odd");
            expect(now_ns() - start < kSecond, "late");
            const Report report = me.engine.report();
            expect(report.complete && report.ranks.size() == n, "no report");
            for (uint32_t r = 0; r < n; ++r) {
              const RankReport& other = report.ranks[r];
              expect(other.entered && other.alive, "rank ", r, " is not in the report");
              expect(other.descriptor == (r == n - 1 ? odd_descriptor : 0x101), "descriptor of ",
                     r);
              expect(other.count == (r == n - 1 ? odd_count : 50), "count of ", r);
              expect(std::string(other.site) == (r == n - 1 ? "odd.py:2 f" : "main.py:1 g"),
                     "site");
            }
            expect_kind("MismatchError", [&] { add_ones(me); }, "the next call");
          }),
      "mismatch");
}

void mismatches() {
  for (const Mode mode : kModes) {
    for (const uint32_t n : {2u, 3u, 5u}) {
      mismatch(mode, n, 0x201, 50);
      mismatch(mode, n, 0x101, 49);
      mismatch(mode, n, 0x101, 5000);
    }
  }
}

// Ranks that only wait (each believes the other is the root), and one that never waits.
void roots_disagree() {
  for (const Mode mode : kModes) {
    for (const bool both_roots : {false, true}) {
      expect_all_fine(
          run(mode, {.n = 2, .timeout_s = 5},
              [=](const Rank& me) {
                const uint32_t root = both_roots ? me.rank : 1 - me.rank;
                const auto call = me.engine.bind(
                    sum_of(from_root(2, me.rank, root, false), 4, uint64_t{root} << 32));
                Ints x(4);
                expect_kind(
                    "MismatchError",
                    [&] {
                      me.engine.run(*call, x.data(), x.data());
                      add_ones(me);  // two roots need the gate of the next call to notice
                    },
                    "root");
              }),
          "roots");
    }
  }
}

// After a mismatch a rank may go on with just the call that a slow peer still waits for it in.
void going_on_after_a_mismatch() {
  std::atomic<bool> gone_on{false};
  const auto until_then = [&] {
    while (!gone_on) std::this_thread::yield();
    return false;
  };
  const auto body = [&](const Rank& me) {
    const auto call = me.engine.bind(sum_of(from_root(3, me.rank, 0, false), 4, 5));
    Ints x(4);
    const auto run_it = [&] { me.engine.run(*call, x.data(), x.data()); };
    add_ones(me);
    if (me.rank == 0) me.engine.set_other_work(until_then);
    if (me.rank == 2) expect_kind("MismatchError", [&] { add_ones(me); }, "the odd call");
    expect_kind("MismatchError", run_it, "the call of the others");
    if (me.rank == 2) gone_on = true;
  };
  expect_all_fine(run(Mode::kThreads, {.n = 3, .timeout_s = 5}, body), "going on");
}

// A symmetric call whose arrays lie in the heap, against tiny pushes into the same flag lines.
void direct_against_tiny() {
  for (int round = 0; round < 50; ++round) {
    expect_all_fine(run(Mode::kThreads, {.n = 3, .timeout_s = 5},
                        [](const Rank& me) {
                          add_ones(me);
                          auto* x = me.symmetric<int64_t>(300);
                          const auto plan =
                              me.rank == 2 ? from_root(3, 2, 2, true) : two_shot_direct(3, me.rank);
                          const auto call = me.engine.bind(
                              sum_of(plan, me.rank == 2 ? 1 : 300, 7 + (me.rank == 2)));
                          expect_kind(
                              "MismatchError",
                              [&] {
                                me.engine.run(*call, x, x);
                                add_ones(me);
                              },
                              "direct");
                        }),
                    "direct against tiny");
  }
}

// The victim has 256 MiB to tear down; the survivors wait for it asleep, or enter later.
void killed() {
  for (const bool asleep : {true, false}) {
    uint64_t* when = static_cast<uint64_t*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const Body body = [=](const Rank& me) {
      add_ones(me);
      if (me.rank == 1) {
        std::vector<char> memory(256 << 20, 1);
        usleep(200000);
        *when = now_ns();
        kill(getpid(), SIGKILL);
      }
      if (!asleep) usleep(400000);
      std::string text;
      const std::string kind = kind_thrown([&] { add_ones(me); }, &text);
      const uint64_t since = now_ns() - *when;
      expect(kind == "PeerLost", "expected PeerLost, got ", kind);
      expect(since < kSecond, "late");
      const Report report = me.engine.report();
      expect(report.culprit == 1 && !report.ranks[1].alive && report.ranks[0].alive, "culprit");
      if (me.rank == 0 && asleep)
        std::printf("      death seen after %.1f ms\n", double(since) / 1e6);
    };
    auto outcomes = run(Mode::kForks, {.n = 4}, body);
    expect(std::string(outcomes[1].kind) == "killed", "the victim lives");
    outcomes.erase(outcomes.begin() + 1);
    expect_all_fine(outcomes, "survivors");
    munmap(when, 4096);
  }
}

// 0 waits for 2, 2 waits for the stopped 1: the culprit is 1 for everybody.
// A rank that notices a failure and dies before it has written about it. The others raise at once,
// with a report that one of them has written, and need not wait for it again.
void reporter_dies() {
  constexpr uint32_t kN = 4;
  const auto outcomes = run(Mode::kForks, {.n = kN}, [](const Rank& me) {
    add_ones(me);
    if (me.rank == 0) {
      const AbortWord word{Cause::kTimeout, 2, 0, uint16_t(me.engine.iteration())};
      me.engine.control().abort_block().word.store(word.pack());
      kill(getpid(), SIGKILL);
    }
    const uint64_t start = now_ns();
    expect_kind("CollTimeout", [&] { add_ones(me); }, "the reporter is dead");
    const Report report = me.engine.report();
    const uint64_t took_ns = now_ns() - start;
    expect(took_ns < kSecond / 2, "it took ", took_ns, " ns");
    expect(report.complete && report.ranks.size() == kN && report.culprit == 2, "no report");
    expect(report.iteration == me.engine.iteration(), "iteration ", report.iteration);
    expect(!report.ranks[0].alive && report.ranks[1].alive, "who lives");
  });
  for (uint32_t rank = 1; rank < kN; ++rank) {
    expect(outcomes[rank].kind[0] == '\0', "rank ", rank, ": ", outcomes[rank].text);
  }
}

void stopped() {
  const Body body = [](const Rank& me) {
    add_ones(me);
    if (me.rank == 1) raise(SIGSTOP);
    const auto chain = [&] {
      Builder plan(3, me.rank, 1, 1);
      plan.fold({in(me.rank, 0)}, {cell(me.rank, 0)});
      if (me.rank == 1) plan.signal(2);
      if (me.rank == 2) plan.wait(1, 2).signal(3);
      if (me.rank == 0) plan.wait(2, 3);
      return plan.done();
    };
    Ints x(4);
    const auto call = me.engine.bind(sum_of(chain(), 4, 9));
    expect_kind(
        "CollTimeout",
        [&] { me.engine.run(*call, x.data(), x.data(), 0, me.rank == 0 ? 0.5 : 20); }, "stopped");
    const Report report = me.engine.report();
    expect(report.culprit == 1 && report.reporter == 0, "culprit ", report.culprit);
    expect(report.ranks[1].state == 'T' && report.ranks[1].alive, "state of the stopped rank");
    expect(report.ranks[0].waiting_peer == 2 && report.ranks[0].waiting_step == 3, "0 waits");
    expect(report.ranks[2].waiting_peer == 1 && report.ranks[2].waiting_step == 2, "2 waits");
  };
  auto outcomes = run(Mode::kForks, {.n = 3}, body, [](const std::vector<pid_t>& pids) {
    waitpid(pids[0], nullptr, 0);
    waitpid(pids[2], nullptr, 0);
    kill(pids[1], SIGKILL);
  });
  outcomes.erase(outcomes.begin() + 1);
  expect_all_fine(outcomes, "stopped");
}

// A rank that waits for seconds must cost little.
void idle_cost() {
  expect_all_fine(run(Mode::kForks, {.n = 2},
                      [](const Rank& me) {
                        if (me.rank == 1) usleep(1000000);
                        const auto cpu = [] {
                          rusage usage;
                          getrusage(RUSAGE_SELF, &usage);
                          return double(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
                                 double(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
                        };
                        const double before = cpu();
                        add_ones(me);
                        if (me.rank == 0)
                          std::printf("      a wait of 1 s costs %.1f ms of CPU\n", cpu() - before);
                      }),
                  "idle");
}

// Rank `refuser` refuses; the others make `call` with these many elements.
using PlanOf = std::shared_ptr<const Plan> (*)(uint32_t n, uint32_t rank);

void refusal(Mode mode, PlanOf plan_of, uint64_t count, bool direct, uint32_t refuser) {
  const Config config{.n = 3, .cell_bytes = 640, .timeout_s = 20};
  expect_all_fine(
      run(mode, config,
          [=](const Rank& me) {
            Ints own(count);
            int64_t* x = direct ? me.symmetric<int64_t>(count) : own.data();
            const auto call = me.engine.bind(sum_of(plan_of(3, me.rank), count, 3));
            for (uint32_t round = 0; round < 50; ++round) {
              const uint64_t before = me.engine.iteration();
              if (me.rank == refuser) {
                me.engine.refuse("x has 3 dimensions", me.engine.site("refuse.py:3"));
                if (round % 3 == 0) me.engine.refuse("again");
              } else {
                for (uint32_t i = 0; i < (round % 3 == 0 ? 2 : 1); ++i) {
                  std::string text;
                  const std::string kind = kind_thrown([&] { me.engine.run(*call, x, x); }, &text);
                  const char* reason = i == 0 ? "x has 3 dimensions" : "again";
                  expect(kind == "PeerRejected" && text.find(reason) != text.npos, "got ", kind,
                         ": ", text);
                }
              }
              expect(me.engine.iteration() == before + (round % 3 == 0 ? 2 : 1),
                     "iterations consumed");
              std::fill(x, x + count, 1);
              me.engine.run(*call, x, x);
              expect(std::count(x, x + count, 3) == int64_t(count), "the call after a refusal");
              add_ones(me, 7);
            }
            expect(me.engine.report().cause == Cause::kNone, "a refusal aborted the communicator");
          }),
      "refusal");
}

void refusals() {
  for (const Mode mode : kModes) {
    for (const uint32_t refuser : {0u, 2u}) {
      refusal(mode, ring, 30, false, refuser);
      refusal(mode, ring, 3000, false, refuser);  // many segments
      refusal(mode, two_shot_direct, 1000, true, refuser);
    }
  }
}

// Ranks whose plans need nothing of the one that refuses hear of it all the same.
void refusal_by_leaf() {
  for (const uint64_t count : {1u, 1000u}) {
    expect_all_fine(run(Mode::kThreads, {.n = 3, .cell_bytes = 640},
                        [=](const Rank& me) {
                          Ints x(count, 5);
                          const auto call =
                              me.engine.bind(sum_of(from_root(3, me.rank, 0, false), count, 4));
                          if (me.rank == 2) {
                            me.engine.refuse("no");
                          } else {
                            const std::string kind =
                                kind_thrown([&] { me.engine.run(*call, x.data(), x.data()); });
                            expect(kind == "PeerRejected", "got ", kind);
                          }
                          for (int i = 0; i < 3; ++i) add_ones(me);
                        }),
                    "leaf");
  }
}

void leaving() {
  for (const Mode mode : kModes) {
    auto outcomes = run(mode, {.n = 3}, [](const Rank& me) {
      add_ones(me);
      if (me.rank == 1) {
        usleep(20000);
        me.engine.leave("ValueError: bad loss");
        return expect_kind("CommClosed", [&] { add_ones(me); }, "after leaving");
      }
      std::string text;
      const std::string kind = kind_thrown([&] { add_ones(me); }, &text);
      expect(kind == "PeerLeft" && text.find("bad loss") != text.npos, kind, ": ", text);
    });
    expect_all_fine(outcomes, "leave");
    outcomes = run(mode, {.n = 3}, [](const Rank& me) {
      for (int i = 0; i < 100; ++i) add_ones(me);
      if (me.rank == 1) return;  // closes
      expect_kind("PeerLeft", [&] { add_ones(me); }, "closed");
    });
    expect_all_fine(outcomes, "close");
  }
}

void aborts() {
  for (const Mode mode : kModes) {
    expect_all_fine(run(mode, {.n = 3},
                        [](const Rank& me) {
                          add_ones(me);
                          if (me.rank == 2) {
                            usleep(50000);  // the others sleep by now
                            me.engine.abort("enough");
                          }
                          std::string text;
                          const std::string kind = kind_thrown([&] { add_ones(me); }, &text);
                          expect(kind == "Revoked" && text.find("enough") != text.npos, kind, ": ",
                                 text);
                        }),
                    "abort");
    // A signal handler that raises; the call is queued in one case, so another thread executes it.
    for (const bool queued : {false, true}) {
      const Config config{.n = 2, .check_signals = [](void*) { return true; }};
      expect_all_fine(
          run(mode, config,
              [=](const Rank& me) {
                const auto call = me.engine.bind(sum_of(one_shot(2, me.rank), 5));
                Ints x(5), y(5);
                if (me.rank == 1) {
                  usleep(100000);
                  return expect_kind(
                      "Revoked", [&] { me.engine.run(*call, x.data(), y.data()); }, "peer");
                }
                if (queued) me.engine.submit(call, x.data(), y.data());
                expect_kind(
                    "Interrupted", [&] { me.engine.run(*call, x.data(), y.data()); }, "signal");
                expect_kind(
                    "Revoked", [&] { me.engine.run(*call, x.data(), y.data()); }, "afterwards");
              }),
          "interrupt");
    }
  }
}

}  // namespace

int main() {
  std::vector<Test> tests = {{"mismatch", mismatches},
                             {"roots disagree", roots_disagree},
                             {"going on after a mismatch", going_on_after_a_mismatch},
                             {"direct against tiny", direct_against_tiny},
                             {"refusal", refusals},
                             {"refusal by a leaf", refusal_by_leaf},
                             {"leave and close", leaving},
                             {"abort and interrupt", aborts}};
  if (kModes.size() > 1) {
    tests.insert(tests.end(), {{"SIGKILL", killed},
                               {"the reporter dies", reporter_dies},
                               {"SIGSTOP", stopped},
                               {"cost of waiting", idle_cost}});
  }
  return main_of(tests);
}
