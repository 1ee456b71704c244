#include "base/ticks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pycoll {
namespace {

bool steady() {
#if defined(__x86_64__)
  constexpr unsigned kPower = 0x80000007, kInvariant = 1 << 8;  // leaf, and bit of EDX
  unsigned eax, ebx, ecx, edx = 0;
  return __get_cpuid(kPower, &eax, &ebx, &ecx, &edx) != 0 && (edx & kInvariant) != 0;
#elif defined(__aarch64__)
  return true;  // the generic timer is the same for all cores
#else
  return false;
#endif
}

}  // namespace

const bool kSteadyTicks = steady();

// The tightest of some tries: this thread may lose its core between the two.
ClockReading read_clocks() {
  constexpr int kTries = 8;
  ClockReading best{};
  uint64_t narrowest = UINT64_MAX;
  for (int i = 0; i < kTries; ++i) {
    const uint64_t before = ticks(), ns = now_ns(), after = ticks();
    if (after - before >= narrowest) continue;
    narrowest = after - before;
    best = {before + narrowest / 2, ns};
  }
  return best;
}

}  // namespace pycoll
