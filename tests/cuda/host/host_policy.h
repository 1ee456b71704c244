// The policy of primitives.h on the host: one lane of a block is a thread, or a fiber of a
// scheduler that decides after every access who goes on.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/types.h"
#include "cuda/kernels/elements.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/layout.h"
#include "cuda/kernels/rms_norm.h"
#include "kernels/optim/optim.h"

namespace pycoll::cuda::host {

namespace conversions {  // the CPU engine's own
#include "kernels/fold/fold_lanes.inl"
#undef PYCOLL_INLINE
}  // namespace conversions

// Loads and stores so far that were not aligned to their size: a device refuses them.
inline std::atomic<uint64_t> g_misaligned{0};

// What a multicast address stands for.
std::vector<char*> multicast_members(const void* address);

// Decides which lane runs. Null members of a policy: lanes are threads.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // A lane has done something, looked at what others did, or has nothing to do but wait.
  enum class Turn { kWork, kLook, kIdle };
  virtual void turn(Turn turn) = 0;
  virtual uint64_t clock_ns() = 0;
};

inline constexpr int kThreadsPerLane = 32;  // a lane stands for a warp
inline constexpr int kMostLanes = kMaxThreads / kThreadsPerLane;

// What the lanes of a block share.
struct Block {
  explicit Block(uint32_t lanes) : lanes(lanes) {}
  const uint32_t lanes;
  Shared shared{};
  int64_t columns[kMostLanes * kExactLimbs];  // of exact sums of squares
  NormSums sums;
  std::atomic<uint32_t> arrived{0}, generation{0}, votes[2] = {0, 0};
};

class HostPolicy {
 public:
  HostPolicy(Block& block, uint32_t lane, Scheduler* scheduler)
      : block_(block), lane_(lane), scheduler_(scheduler) {}

  uint32_t tid() const { return lane_; }
  uint32_t threads() const { return block_.lanes; }
  Shared& shared() const { return block_.shared; }
  int64_t* columns() const { return block_.columns; }
  NormSums& sums() const { return block_.sums; }
  void barrier() const { (void)arrive(false); }
  bool any(bool mine) const { return arrive(mine); }

  uint32_t load_acquire(const uint32_t* p) const {
    turn(Turn::kLook);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
  }
  uint32_t load_relaxed(const uint32_t* p) const { return __atomic_load_n(p, __ATOMIC_RELAXED); }
  uint64_t load_relaxed(const uint64_t* p) const { return __atomic_load_n(p, __ATOMIC_RELAXED); }
  void store_release(uint32_t* p, uint32_t value, Reach = Reach::kSystem) const {
    turn(Turn::kWork);
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
  }
  void store_relaxed(uint32_t* p, uint32_t value) const {
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
  }
  uint32_t add(uint32_t* p, uint32_t value, Reach) const {
    turn(Turn::kWork);
    return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
  }
  bool claim(uint32_t* p) const {
    uint32_t expected = 0;
    return __atomic_compare_exchange_n(p, &expected, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  }
  void count(uint64_t* p, uint64_t value) const {
    turn(Turn::kWork);
    __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  }

  template <int kBytes>
  Raw<kBytes> load(const char* p) const {
    turn(Turn::kWork);
    check_aligned(p, kBytes);
    Raw<kBytes> raw;
    std::memcpy(&raw, p, kBytes);
    return raw;
  }
  template <int kBytes>
  void store(char* p, const Raw<kBytes>& raw) const {
    turn(Turn::kWork);
    check_aligned(p, kBytes);
    std::memcpy(p, &raw, kBytes);
  }

  // Multicast: one address for the same place of several memories; see host_memory.cpp.
  void begin_multicast() const {}
  void end_multicast() const {}
  template <typename T>
  Raw<16> sum_of_all(const char* p) const {
    using L = Lanes<HostPolicy, T, 16>;
    typename L::Vals sum{};
    for (const char* at : multicast_members(p)) {
      sum = combine<ReduceOp::kSum>(sum, L::decode(*this, load<16>(at)));
    }
    return L::encode(*this, sum);
  }
  template <typename T>
  void store_to_all(char* p, const Raw<16>& pack) const {
    for (char* at : multicast_members(p)) store(at, pack);
  }

  // The halves of a packet move one by one; which one is first depends on the address, for those
  // who write differently than for those who read.
  Packet load_packet(const char* p) const {
    check_aligned(p, sizeof(Packet));
    Packet packet;
    for (uintptr_t h : {bit(p, 5), 1 - bit(p, 5)}) {
      turn(Turn::kLook);
      packet.half[h] = __atomic_load_n(reinterpret_cast<const uint64_t*>(p) + h, __ATOMIC_RELAXED);
    }
    return packet;
  }
  void store_packet(char* p, const Packet& packet) const {
    check_aligned(p, sizeof(Packet));
    for (uintptr_t h : {bit(p, 4), 1 - bit(p, 4)}) {
      turn(Turn::kWork);
      __atomic_store_n(reinterpret_cast<uint64_t*>(p) + h, packet.half[h], __ATOMIC_RELAXED);
    }
  }

  uint64_t clock_ns() const {
    if (scheduler_ != nullptr) return scheduler_->clock_ns();
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  }
  void backoff(uint32_t) const { turn(Turn::kIdle); }

  float half_to_float(uint16_t bits) const {
    return conversions::load_half<1>(reinterpret_cast<const char*>(&bits));
  }
  uint16_t float_to_half(float value) const { return conversions::pack_half<1>(value); }

 private:
  using Turn = Scheduler::Turn;

  void turn(Turn turn) const {
    if (scheduler_ != nullptr) {
      scheduler_->turn(turn);
    } else if (turn == Turn::kIdle) {
      sched_yield();
    }
  }

  static uintptr_t bit(const void* p, int number) {
    return reinterpret_cast<uintptr_t>(p) >> number & 1;
  }

  static void check_aligned(const void* p, uintptr_t nbytes) {
    if (reinterpret_cast<uintptr_t>(p) % nbytes != 0) g_misaligned.fetch_add(1);
  }

  // A barrier that counts votes. The last lane to come clears the votes of the barrier before,
  // which all lanes have read by then.
  bool arrive(bool mine) const {
    const uint32_t now = block_.generation.load(std::memory_order_relaxed);
    if (mine) block_.votes[now & 1].store(1, std::memory_order_relaxed);
    if (block_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == block_.lanes) {
      block_.arrived.store(0, std::memory_order_relaxed);
      block_.votes[~now & 1].store(0, std::memory_order_relaxed);
      block_.generation.store(now + 1, std::memory_order_release);
    } else {
      while (block_.generation.load(std::memory_order_acquire) == now) turn(Turn::kIdle);
    }
    return block_.votes[now & 1].load(std::memory_order_relaxed) != 0;
  }

  Block& block_;
  uint32_t lane_;
  Scheduler* scheduler_;
};

// What stands for a kernel.
using HostKernel = void (*)(const HostPolicy& p, uint32_t block, const void* parameter);

}  // namespace pycoll::cuda::host
