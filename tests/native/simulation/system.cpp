// What the engine asks of the system, of the simulated machine.
#include "base/liveness.h"
#include "base/wait.h"
#include "engine/liveness_hold.h"
#include "state.h"

#undef memcpy

namespace pycoll {

using namespace simulation;

Sharing sharing_own_cores(uint32_t ranks) {
  const bool crowded = world != nullptr && world->sleepy;
  return {ranks, crowded ? 0 : ranks};
}
WaitPolicy default_policy(Sharing) {
  constexpr uint32_t kLong = 1'000'000;  // who is not woken is seen to sleep too long
  if (world != nullptr && world->long_sleeps) {
    return {.spins = 0, .yield_us = 0, .first_slice_us = kLong, .last_slice_us = kLong};
  }
  return {.spins = 2, .yield_us = world != nullptr && world->sleepy ? 0u : 50u, .burst = 2};
}
WaitPolicy background_policy(Sharing sharing) { return default_policy(sharing); }
void shorten_slice() {}
uint32_t own_patience() { return 0; }
void leave_core() {}
uint64_t now_ns() { return world == nullptr ? 0 : world->now_ns; }
uint64_t coarse_ns() { return now_ns(); }

// A bell's word is an atomic of 32 bits, or the upper half of one of 64.
static uint32_t look_at_word(const void* word) {
  const auto at = reinterpret_cast<uintptr_t>(word);
  if (world->places.count(at) == 0 && world->places.count(at - 4) != 0) {
    const auto* whole = reinterpret_cast<const void*>(at - 4);
    return uint32_t(look(place_of(whole, 8), Order::seq_cst) >> 32);
  }
  return uint32_t(look(place_of(word, 4), Order::seq_cst));
}

void wake(const Bell& bell) {
  point();
  for (Fiber& fiber : world->fibers) {
    if (fiber.sleeps_on != bell.word || fiber.over) continue;
    fiber.woken = true;
    fiber.wake_ns = 0;
  }
}

uint32_t load_bell(const Bell& bell) {
  if (bell.word == nullptr) return 0;
  point();
  return look_at_word(bell.word);
}

void sleep_on(const Bell& bell, uint32_t seen, uint32_t us) {
  point();
  if (bell.word != nullptr && look_at_word(bell.word) != seen) return;
  Fiber& fiber = me();
  fiber.sleeps_on = bell.word;
  fiber.woken = false;
  fiber.wake_ns = world->now_ns + uint64_t{us} * 1000;
  to_home();
  fiber.wake_ns = 0;
  fiber.sleeps_on = nullptr;
  if (bell.word == nullptr || fiber.woken || raw(bell.word, 4) == seen) return;
  const bool killed = std::any_of(world->fibers.begin(), world->fibers.end(), [](const Fiber& f) {
    return f.over && !f.thread->finished;  // maybe between the store and the wake-up
  });
  if (!killed && world->changed_ns[bell.word] + kSlowWakeNs < world->now_ns) {
    world->wrong = "a wake-up is lost";
    to_home();
  }
}

void init_liveness(pthread_mutex_t*) {}

bool owner_died(pthread_mutex_t* address) {
  point();
  const Lock& lock = world->locks[address];
  if (lock.owner_died) join(me().clock, lock.released);
  return lock.owner_died;
}

bool is_unowned(pthread_mutex_t* address) {
  const Lock& lock = world->locks[address];
  return lock.owner == kMost && !lock.owner_died;
}

ProcessStat process_stat(int32_t pid) {
  const uint32_t process = uint32_t(pid - kFirstPid);
  if (world == nullptr || process >= world->processes->size()) return {'?', 0};
  const Thread& t = (*world->processes)[process];
  if (t.dead && world->now_ns >= t.died_ns + kExitNs) return {'?', 0};
  return {t.dead ? 'D' : 'R', uint64_t(process) + 1};
}

bool process_over(int32_t pid, uint64_t starttime) {
  point();
  const bool over = process_stat(pid).starttime != starttime;
  for (const Fiber& fiber : world->fibers) {
    if (over && fiber.process == uint32_t(pid - kFirstPid)) join(me().clock, fiber.clock);
  }
  return over;
}

// A rank holds the lock that shows that it lives by itself.
LivenessHold::LivenessHold(pthread_mutex_t* lock) : lock_(lock) { simulation::try_lock(lock_); }
LivenessHold::~LivenessHold() {
  if (!inside()) return;
  for (auto& [address, lock] : world->locks) {
    if (lock.owner == world->running) {
      point();
      lock.owner = kMost;
      lock.released = me().clock;
    }
  }
}

}  // namespace pycoll
