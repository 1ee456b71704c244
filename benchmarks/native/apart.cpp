// How far apart the cores of two ranks are: the time of a barrier between them.
//
// A virtual machine may find its cores near each other now and far apart a second later, when the
// host has moved one; what two ranks exchange then takes twice as long and more.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace {

constexpr int kBatches = 9, kRounds = 200;
constexpr uint32_t kPatience = 20000;  // looks at the other's word before it gives up its core

struct alignas(128) Word {
  std::atomic<uint32_t> value;
};

}  // namespace

// Called by ranks 0 and 1 at about the same time, on 256 zeroed bytes that both map. Returns
// nanoseconds of a barrier, the median of a few batches.
extern "C" double apart_ns(void* memory, int rank) {
  auto* words = static_cast<Word*>(memory);
  std::atomic<uint32_t>&own = words[rank].value, &other = words[1 - rank].value;
  uint32_t round = own.load();
  double found[kBatches];
  for (double& each : found) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i) {
      own.store(++round, std::memory_order_release);
      uint32_t looks = 0;
      while (static_cast<int32_t>(other.load(std::memory_order_acquire) - round) < 0) {
        if (++looks % kPatience == 0) sched_yield();
      }
    }
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
    each = spent.count() / kRounds;
  }
  std::sort(found, found + kBatches);
  return found[kBatches / 2];
}
