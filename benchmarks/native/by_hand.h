// What ranks need who do a collective by hand: flags, and a place in memory that all of them map.
// The functions of the limit_*.cpp are called by benchmarks/harness/ranks.py, in the very processes
// that also run pycoll.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t kHeader = 4096, kGap = 8192;

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

  void step() const { flag(rank).value.store(++*turn, std::memory_order_release); }
  // Until the peer, of two ranks, has made as many steps as this one.
  void wait() const {
    while (flag(1 - rank).value.load(std::memory_order_acquire) < *turn) pause_cpu();
  }
  void meet() const { step(), wait(); }
};

}  // namespace
