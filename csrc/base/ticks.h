// A counter of the processor that runs at one rate on all cores, and how its ticks become time.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "base/wait.h"

namespace pycoll {

// Whether this processor's counter is such a one (on x86, of an "invariant TSC"); asked once.
extern const bool kSteadyTicks;

// Its reading; that of CLOCK_MONOTONIC, in ns, where there is none. Loads and stores may move past
// it, by some ns.
inline uint64_t ticks() {
#if defined(__x86_64__)
  if (kSteadyTicks) [[likely]]
    return __rdtsc();
#elif defined(__aarch64__)
  if (kSteadyTicks) [[likely]] {
    uint64_t now;
    asm volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
  }
#endif
  return now_ns();
}

// Both at the same moment.
struct ClockReading {
  uint64_t ticks, ns;
};
ClockReading read_clocks();

// The time of ticks around two readings.
struct Scale {
  Scale(const ClockReading& from, const ClockReading& to)
      : end(to),
        ns_per_tick(static_cast<double>(to.ns - from.ns) /
                    static_cast<double>(to.ticks - from.ticks)) {}
  uint64_t ns_at(uint64_t ticks) const {
    const double ago = static_cast<double>(static_cast<int64_t>(end.ticks - ticks)) * ns_per_tick;
    return end.ns - static_cast<uint64_t>(static_cast<int64_t>(ago));
  }
  ClockReading end;
  double ns_per_tick;
};

}  // namespace pycoll
