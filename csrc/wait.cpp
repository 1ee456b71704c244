#include "wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace pycoll {
namespace {

using AliasedWord [[gnu::may_alias]] = uint32_t;  // the upper half of a flag word, for one

timespec timespec_of_us(uint32_t us) { return {us / 1000000, long{us % 1000000} * 1000}; }

}  // namespace

WaitPolicy default_policy(uint32_t ranks) {
  cpu_set_t cores;
  const int usable = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  if (ranks <= static_cast<uint32_t>(usable)) return {.spins = 200, .yield_us = 1000, .burst = 50};
  return {.spins = 50, .yield_us = 1000};
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

void wake(const Bell& bell) {
  syscall(SYS_futex, bell.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t load_bell(const Bell& bell) {
  if (bell.word == nullptr) return 0;
  return __atomic_load_n(static_cast<const AliasedWord*>(bell.word), __ATOMIC_SEQ_CST);
}

void sleep_on(const Bell& bell, uint32_t seen, uint32_t us) {
  const timespec slice = timespec_of_us(us);
  if (bell.word == nullptr) {
    nanosleep(&slice, nullptr);
  } else {
    syscall(SYS_futex, bell.word, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
}

}  // namespace pycoll
