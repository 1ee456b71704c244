// The least that ranks do who share cores: barriers and sums by hand, in which a rank that has to
// wait gives its core away, and nothing else. Driven by benchmarks/crowd.py.
#include <algorithm>
#include <cstring>

#include "by_hand.h"

namespace {

constexpr size_t kPitch = 4 << 20, kBlock = 1024;

// Of ranks that have a place of `kPitch` bytes each.
struct Crowd : Ranks {
  void meet() const {
    const uint64_t now = ++*turn;
    flag(rank).value.store(now, std::memory_order_seq_cst);
    for (size_t peer = 0; peer < ranks; ++peer) {
      while (flag(peer).value.load(std::memory_order_acquire) < now) sched_yield();
    }
  }
  float* place(size_t of) const { return reinterpret_cast<float*>(bytes() + of * (kPitch + kGap)); }
};

// The part of `count` elements that rank `of` folds.
size_t begin_of(const Crowd& crowd, size_t count, size_t of) { return count * of / crowd.ranks; }

// Adds up elements [at, at + kBlock) of all ranks, those of `rank` out of `own`.
void add_up(const Crowd& crowd, const float* own, size_t at, size_t length, float* sum) {
  for (size_t peer = 0; peer < crowd.ranks; ++peer) {
    const float* from = (peer == crowd.rank ? own : crowd.place(peer)) + at;
    if (peer == 0) {
      std::memcpy(sum, from, length * sizeof(float));
    } else {
      for (size_t i = 0; i < length; ++i) sum[i] += from[i];
    }
  }
}

}  // namespace

extern "C" {

size_t shared_bytes(size_t ranks) { return ranks * (kPitch + kGap); }

void crowd_barriers(Crowd crowd, size_t calls) {
  for (size_t i = 0; i < calls; ++i) crowd.meet();
}

// All arrays lie in the places: each rank sums its part of all of them and stores it in all.
void crowd_symmetric_sum(Crowd crowd, size_t count) {
  alignas(64) float sum[kBlock];
  const size_t end = begin_of(crowd, count, crowd.rank + 1);
  crowd.meet();
  for (size_t at = begin_of(crowd, count, crowd.rank); at < end; at += kBlock) {
    const size_t length = std::min(kBlock, end - at);
    add_up(crowd, crowd.place(crowd.rank), at, length, sum);
    for (size_t peer = 0; peer < crowd.ranks; ++peer) {
      std::memcpy(crowd.place(peer) + at, sum, length * sizeof(float));
    }
  }
  crowd.meet();
}

// Arrays are private: segment by segment, each rank copies the others' parts into its place, sums
// its own part of all, and copies what the others have summed out of theirs. Places hold two
// segments.
void crowd_staged_sum(Crowd crowd, float* x, size_t count, size_t segment) {
  alignas(64) float sum[kBlock];
  const size_t rank = crowd.rank;
  for (size_t start = 0, i = 0; start < count; start += segment, ++i) {
    const size_t length = std::min(segment, count - start);
    float* own = x + start;
    Crowd half = crowd;  // the half of each place that is free
    half.memory = static_cast<char*>(crowd.memory) + i % 2 * (kPitch / 2);
    const size_t begin = begin_of(crowd, length, rank), end = begin_of(crowd, length, rank + 1);
    std::memcpy(half.place(rank), own, begin * sizeof(float));
    std::memcpy(half.place(rank) + end, own + end, (length - end) * sizeof(float));
    crowd.meet();
    for (size_t at = begin; at < end; at += kBlock) {
      const size_t few = std::min(kBlock, end - at);
      add_up(half, own, at, few, sum);
      std::memcpy(own + at, sum, few * sizeof(float));
      std::memcpy(half.place(rank) + at, sum, few * sizeof(float));
    }
    crowd.meet();
    for (size_t peer = 0; peer < crowd.ranks; ++peer) {
      const size_t from = begin_of(crowd, length, peer), to = begin_of(crowd, length, peer + 1);
      if (peer != rank) {
        std::memcpy(own + from, half.place(peer) + from, (to - from) * sizeof(float));
      }
    }
  }
}

}  // extern "C"
