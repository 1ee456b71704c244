// Counting who is left: all who are get the same answer, whoever goes, and whenever.
#include <sys/mman.h>
#include <sys/resource.h>

#include <array>
#include <csignal>
#include <random>

#include "base/liveness.h"
#include "engine/survivors.h"
#include "world.h"

namespace {

using namespace world;

constexpr uint32_t kGoals = 6;  // so many times all that are left join

// When a rank goes, in the attempt for which goal: not at all, before it comes, before it joins,
// after it has.
enum class End { kNever, kBeforeComing, kBeforeJoining, kAfterJoining };

// What was joined, by round; in memory that forked ranks share.
using Joined = std::array<std::atomic<uint64_t>, 256>;

void go(const Rank& me) {
  if (me.mode == Mode::kForks) raise(SIGKILL);
  me.engine.leave("it goes");
}

uint64_t mask_of(const std::vector<uint32_t>& ranks) {
  uint64_t mask = 0;
  for (const uint32_t rank : ranks) mask |= uint64_t{1} << rank;
  return mask;
}

void take_part(const Rank& me, const std::shared_ptr<ControlSegment>& control, uint64_t seed,
               uint64_t staying, Joined& joined) {
  std::mt19937_64 random(seed * 64 + me.rank);
  const bool stays = (staying >> me.rank & 1) != 0;
  const End end = stays ? End::kNever : End(1 + random() % 3);
  const uint32_t last = 1 + random() % (kGoals - 2);
  const uint64_t until = now_ns() + 50'000'000'000;
  Survivors survivors(control, me.rank, me.mode == Mode::kThreads);
  for (uint32_t goal = 1; goal <= kGoals;) {
    const bool goes = !stays && goal == last;
    if (goes && end == End::kBeforeComing) return go(me);
    const bool hasty = random() % 2 == 0;
    const auto left = survivors.agree(-1, [&](Pulse) {
      expect(now_ns() < until, "no agreement in time");
      return hasty && random() % 8 == 0;
    });
    if (left.empty()) continue;
    const uint64_t mask = mask_of(left);
    expect((mask >> me.rank & 1) != 0, "not in it itself");
    expect((mask & staying) == staying, "one that lives was left out");
    if (goes && end == End::kBeforeJoining) return go(me);
    const uint64_t round = control->block(me.rank).came.load();
    Round ended = Round::kLate;
    while (ended == Round::kLate) {
      ended = survivors.join([&](Pulse) {
        expect(now_ns() < until, "not joined in time");
        return hasty;
      });
    }
    if (ended == Round::kAnother) continue;
    uint64_t known = 0;
    if (!joined[round].compare_exchange_strong(known, mask)) {
      expect(known == mask, "round ", round, ": ", known, " and ", mask);
    }
    if (goal++ == kGoals) expect(mask == staying, "left: ", mask, ", expected: ", staying);
    if (goes && end == End::kAfterJoining) return go(me);
  }
}

void all_get_the_same() {
  void* memory =
      mmap(nullptr, sizeof(Joined), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    auto* joined = new (memory) Joined{};
    std::mt19937_64 random(seed);
    const uint32_t n = 1 + random() % 6;
    const uint64_t staying = (random() | uint64_t{1} << random() % n) & ((uint64_t{1} << n) - 1);
    const Mode mode = kModes[seed % kModes.size()];
    const auto outcomes = run(mode, {.n = n}, [&](const Rank& me) {
      const std::shared_ptr<ControlSegment> control(&me.engine.control(), [](auto*) {});
      take_part(me, control, seed, staying, *joined);
    });
    for (uint32_t r = 0; r < n; ++r) {
      const bool killed = mode == Mode::kForks && (staying >> r & 1) == 0;
      expect(std::string(outcomes[r].kind) == (killed ? "killed" : ""), "seed ", seed, ", rank ", r,
             " of ", n, ": ", outcomes[r].kind, ": ", outcomes[r].text);
    }
  }
  munmap(memory, sizeof(Joined));
}

// Who counts may die with the lock; the next one takes it over.
void the_one_who_counts_dies() {
  const auto outcomes = run(Mode::kForks, {.n = 3}, [](const Rank& me) {
    const std::shared_ptr<ControlSegment> control(&me.engine.control(), [](auto*) {});
    if (me.rank == 0) {
      pthread_mutex_lock(&control->election().lock);
      raise(SIGKILL);
    }
    Survivors survivors(control, me.rank, false);
    const auto never = [](Pulse) { return false; };
    expect(survivors.agree(-1, never) == std::vector<uint32_t>{1, 2}, "another answer");
    expect(survivors.join(never) == Round::kJoined, "not joined");
  });
  for (uint32_t r = 1; r < 3; ++r) expect(outcomes[r].kind[0] == '\0', outcomes[r].text);
}

// Who counts may be stopped with the lock: the others give up waiting, and go on with it later.
void the_one_who_counts_is_stopped() {
  expect_all_fine(run(Mode::kThreads, {.n = 2},
                      [](const Rank& me) {
                        const std::shared_ptr<ControlSegment> control(&me.engine.control(),
                                                                      [](auto*) {});
                        if (me.rank == 1) return;
                        while (control->block(1).phase.load() != uint32_t(Phase::kClosed)) {
                          cpu_pause();
                        }
                        Survivors survivors(control, 0, true);
                        const auto soon = [](Pulse) { return true; };
                        pthread_mutex_lock(&control->election().lock);
                        expect(survivors.agree(-1, soon).empty(), "decided without the lock");
                        expect(control->block(0).came.load() == 1, "it cannot have withdrawn");
                        pthread_mutex_unlock(&control->election().lock);
                        expect(survivors.agree(-1, soon).size() == 1, "not decided");
                        expect(control->block(0).came.load() == 1, "another round");
                        expect(survivors.join(soon) == Round::kJoined, "not joined");
                      }),
                  "stopped");
}

// A rank with a thread inside of a direct call may still write into the arrays of others.
void who_is_in_a_call_is_not_gone() {
  expect_all_fine(
      run(Mode::kThreads, {.n = 2},
          [](const Rank& me) {
            const std::shared_ptr<ControlSegment> control(&me.engine.control(), [](auto*) {});
            RankBlock& other = control->block(1);
            if (me.rank == 1) {
              other.inside.store(7);
              return me.engine.leave("it goes");
            }
            while (other.phase.load() != uint32_t(Phase::kLeft)) cpu_pause();
            Survivors survivors(control, 0, true);
            const auto soon = [end = now_ns() + 50'000'000](Pulse) { return now_ns() > end; };
            expect(survivors.agree(-1, soon).empty(), "left out too early");
            expect(survivors.missing() == std::vector<uint32_t>{1}, "not missing");
            other.inside.store(0);
            expect(survivors.agree(-1, soon).size() == 1, "not left out");
          }),
      "inside");
}

// Who has no descriptor left to look is not told that a process is over.
void which_process_is_over() {
  const int32_t pid = getpid();
  const uint64_t born = process_stat(pid).starttime;
  expect(born != 0 && !process_over(pid, born), "this process is over");
  expect(process_over(pid, born + 1), "an older process of that number is not over");
  rlimit before, none;
  getrlimit(RLIMIT_NOFILE, &before);
  none = before;
  none.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &none);
  const bool over = process_over(pid, born);
  setrlimit(RLIMIT_NOFILE, &before);
  expect(!over, "over, as nothing can be opened");
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t ended;
  waitid(P_PID, id_t(child), &ended, WEXITED | WNOWAIT);
  expect(process_over(child, process_stat(child).starttime), "a zombie is not over");
  waitpid(child, nullptr, 0);
  expect(process_over(child, born), "a process that is gone is not over");
}

}  // namespace

int main() {
  std::vector<Test> tests = {{"all get the same", all_get_the_same},
                             {"who is in a call is not gone", who_is_in_a_call_is_not_gone},
                             {"the one who counts is stopped", the_one_who_counts_is_stopped},
                             {"which process is over", which_process_is_over}};
  if (kModes.size() > 1) tests.push_back({"the one who counts dies", the_one_who_counts_dies});
  return main_of(tests);
}
