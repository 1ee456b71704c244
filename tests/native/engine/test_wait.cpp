// A thread that shares its core with the one it waits for notices it, and can leave.
#include <sched.h>

#include <chrono>
#include <set>
#include <thread>

#include "base/wait.h"
#include "calls.h"

namespace {

using namespace calls;
using namespace pycoll;
using Way = SharedCore::Way;

constexpr uint64_t kHandedOver = 3000, kNobody = 300;  // nanoseconds of a yield

// Hands over until that is noticed; returns after how many waits, and how it waits then.
std::pair<uint32_t, Way> hand_over(SharedCore& core) {
  for (uint32_t waits = 0; waits < 1000; ++waits) {
    const Way way = core.way();
    if (way != Way::kYield) return {waits, way};
    core.yielded(kHandedOver);
  }
  return {1000, Way::kYield};
}

void handing_over() {
  SharedCore core;
  const auto [waits, way] = hand_over(core);
  expect(way == Way::kSleep, "a sleeper may be woken on an idle core");
  expect(waits >= 16 && waits < 32, "soon, but not at once: after ", waits, " waits");
  expect(core.way() == Way::kYield, "it sleeps once");
  expect(hand_over(core).second == Way::kMove, "if that has not helped, it leaves");
  expect(hand_over(core).second == Way::kSleep, "and so on in turn");
}

void other_waits() {
  SharedCore core;
  for (int i = 0; i < 1000; ++i) {
    expect(core.way() == Way::kYield, "what is not handed over does not count");
    if (i % 2 == 0) core.yielded(kHandedOver);
    if (i % 4 == 1) core.yielded(kNobody);
    if (i % 4 == 3) core.waited();
  }
}

void threads_differ() {
  std::set<uint32_t> found;
  for (int i = 0; i < 16; ++i) {
    std::thread([&] {
      SharedCore core;
      found.insert(hand_over(core).first);
    }).join();
  }
  expect(found.size() > 1, "of two threads one leaves first");
}

cpu_set_t usable() {
  cpu_set_t cores;
  expect(sched_getaffinity(0, sizeof(cores), &cores) == 0, "the cores of this thread are known");
  return cores;
}

void leaving() {
  const cpu_set_t before = usable();
  std::thread([&] {
    bool left = CPU_COUNT(&before) < 2;
    for (int i = 0; i < 100 && !left; ++i) {  // the scheduler may bring it back in between
      const int core = sched_getcpu();
      leave_core();
      left = sched_getcpu() != core;
      std::this_thread::sleep_for(std::chrono::milliseconds(11));
    }
    expect(left, "it is on another core");
    const cpu_set_t after = usable();
    expect(CPU_EQUAL(&before, &after), "it may use the same cores as before");
  }).join();
}

void bound_threads_stay() {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    expect(sched_setaffinity(0, sizeof(one), &one) == 0, "a thread may be bound to its core");
    leave_core();
    const cpu_set_t after = usable();
    expect(CPU_EQUAL(&one, &after), "who is bound to one core stays there");
  }).join();
}

// Two ranks that are bound to a core each wait as two that may use both cores.
void bound_ranks_spin() {
  expect(default_policy({2, 2}).spins > 0, "there is a core for each rank");
  expect(default_policy({2, 1}).spins == 0, "the awaited rank may need this core");
  expect(background_policy({2, 4}).yield_us > 0, "there is a core for each thread");
  expect(background_policy({2, 3}).yield_us == 0, "a thread would get half of this core");
  const auto told = [](const world::Rank& me) {
    for (const uint32_t cores : {1u, 2u}) {
      me.engine.share_cores({2, cores});
      expect((me.engine.policy().spins > 0) == (cores == 2), "an engine does as it is told");
    }
  };
  expect(world::run(world::Mode::kThreads, {.n = 1}, told)[0].kind[0] == 0, "it is not told");
}

}  // namespace

int main() {
  return main_of({{"handing over", handing_over},
                  {"other waits", other_waits},
                  {"threads differ", threads_differ},
                  {"leaving", leaving},
                  {"bound threads stay", bound_threads_stay},
                  {"bound ranks spin", bound_ranks_spin}});
}
