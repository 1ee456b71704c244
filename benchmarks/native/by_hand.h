// What ranks need who do a collective by hand: flags, and a place in memory that all of them map.
// The functions of limit_all_reduce.cpp are called by benchmarks/harness/ranks.py, in the very
// processes that also run pycoll.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t kHeader = 4096;

struct alignas(128) Flag {
  std::atomic<uint64_t> value;
};

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Ranks that share `memory`: a header with their flags, and what follows.
struct Ranks {
  void* memory;
  size_t rank, ranks;
  uint64_t* turn;  // synchronisations so far, alike on all ranks

  Flag& flag(size_t of) const { return static_cast<Flag*>(memory)[of]; }
  char* bytes() const { return static_cast<char*>(memory) + kHeader; }

  // Returns when the peer, of two ranks, has called it as often as this one.
  void meet() const {
    flag(rank).value.store(++*turn, std::memory_order_release);
    while (flag(1 - rank).value.load(std::memory_order_acquire) < *turn) pause_cpu();
  }
};

}  // namespace
