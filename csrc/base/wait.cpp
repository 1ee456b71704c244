#include "base/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstring>

namespace pycoll {
namespace {

using AliasedWord [[gnu::may_alias]] = uint32_t;  // the upper half of a flag word, for one

uint64_t ns_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

timespec timespec_of_us(uint32_t us) { return {us / 1000000, long{us % 1000000} * 1000}; }

}  // namespace

Sharing sharing_own_cores(uint32_t ranks) {
  cpu_set_t cores;
  const int usable = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return {ranks, static_cast<uint32_t>(usable)};
}

WaitPolicy default_policy(Sharing sharing) {
  if (sharing.crowded()) return {.spins = 0, .yield_us = 1000};
  return {.spins = 200, .yield_us = 1000, .burst = 50, .spread = true};
}

WaitPolicy background_policy(Sharing sharing) {
  sharing.ranks *= 2;
  WaitPolicy policy = default_policy(sharing);
  if (sharing.crowded()) policy.yield_us = 0;
  return policy;
}

void shorten_slice() {
  static thread_local bool done = false;
  if (done) return;
  done = true;
  struct {  // struct sched_attr of the kernel, first version
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  } attr{};
  constexpr uint32_t kBytes = 48;
  static_assert(sizeof(attr) == kBytes);
  if (syscall(SYS_sched_getattr, 0, &attr, kBytes, 0) != 0 || attr.policy != SCHED_OTHER) return;
  attr.size = kBytes;
  attr.runtime_ns = 100'000;
  syscall(SYS_sched_setattr, 0, &attr, 0);
}

uint32_t own_patience() { return static_cast<uint32_t>(syscall(SYS_gettid)) % 16; }

void leave_core() {
  constexpr uint64_t kPauseNs = 10'000'000;
  static thread_local uint64_t last_ns = 0;
  if (now_ns() - last_ns < kPauseNs) return;
  last_ns = now_ns();
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  cpu_set_t others = usable;
  CPU_CLR(sched_getcpu(), &others);
  if (CPU_COUNT(&others) == 0) return;
  // A thread that may use every core is to go on so, also when there are more.
  if (CPU_COUNT(&usable) == sysconf(_SC_NPROCESSORS_CONF)) std::memset(&usable, -1, sizeof(usable));
  if (sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(usable), &usable);
  }
}

uint64_t now_ns() { return ns_of(CLOCK_MONOTONIC); }
uint64_t coarse_ns() { return ns_of(CLOCK_MONOTONIC_COARSE); }

void wake(const Bell& bell) {
  syscall(SYS_futex, bell.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t load_bell(const Bell& bell) {
  if (bell.word == nullptr) return 0;
  return __atomic_load_n(static_cast<const AliasedWord*>(bell.word), __ATOMIC_SEQ_CST);
}

void sleep_on(const Bell& bell, uint32_t seen, uint32_t us) {
  const timespec slice = timespec_of_us(us);
  if (bell.alarm != nullptr) {
    bell.alarm->sleep(us);
  } else if (bell.word == nullptr) {
    nanosleep(&slice, nullptr);
  } else {
    syscall(SYS_futex, bell.word, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
}

}  // namespace pycoll
