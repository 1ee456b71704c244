// How a rank stores what it puts into its cell, where peers read it at once.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "recent_times.h"

namespace pycoll {

// Ordinary stores leave the bytes in the caches. That is best for peers nearby. But a line that a
// peer has read must be taken from it before it is written again, and if the peer's core is far
// away (in another cluster of cores, on another socket) that takes longer than to go through
// memory; docs/decisions/0009-stores-into-cells.md has the numbers.
//
// Nobody tells a rank how far its peers are, and they move. So it times its own copies of about one
// size: now and then some are made in the other way, and the faster way counts. A copy past the
// caches must save more than it takes peers to fetch its bytes from memory. Not thread-safe.
class CellStores {
 public:
  // Whether the next copy goes past the caches.
  bool past_caches() const { return past_ != tries(); }

  // Whether it is to be timed: of tries the last ones, for the first ones find the lines of the
  // cells, which exist twice, where the other way has left them.
  bool timed() const {
    if (tries()) return turn() >= kTries - kTimedTries;
    return copies_ < kFirstTry || copies_ % kTimedEvery == 0;
  }

  // What stores belong to that nobody times.
  bool usually_past_caches() const { return past_; }

  // Ends the copy that the above tells about; `ns`: what it took if it was timed.
  void note(uint64_t nbytes, uint64_t ns) {
    if (timed()) {
      times_[past_caches()].note(static_cast<double>(ns) / static_cast<double>(nbytes));
    }
    if (turn() + 1 >= kTries) {
      const double fetch = kFetchNs / static_cast<double>(nbytes) + kFetchNsPerByte;
      past_ = times_[1].best_or(kUnknown) + fetch < times_[0].best_or(kUnknown);
    }
    ++copies_;
  }

 private:
  static constexpr uint64_t kTimedEvery = 8, kTryEvery = 512, kFirstTry = 7;
  static constexpr uint64_t kTries = 4, kTimedTries = 2;           // in a row
  static constexpr double kFetchNs = 700, kFetchNsPerByte = 0.05;  // about: bytes of no cache
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  // Copies since the other way was to be tried.
  uint64_t turn() const { return (copies_ - kFirstTry) % kTryEvery; }
  bool tries() const { return turn() < kTries; }

  bool past_ = false;
  uint64_t copies_ = 0;
  std::array<RecentTimes, 2> times_;  // ns a byte: of ordinary stores, past the caches
};

// The choice for copies of every size.
class CellStoresBySize {
 public:
  static constexpr uint64_t kLeastBytes = 4 << 10;  // smaller copies go through the caches

  CellStores& operator[](uint64_t nbytes) {
    const int doublings = std::bit_width(nbytes / kLeastBytes);
    return stores_[static_cast<size_t>(std::clamp(doublings - 1, 0, kSizes - 1))];
  }

 private:
  static constexpr int kSizes = 4;  // from 4, 8, 16 and 32 KiB on
  std::array<CellStores, kSizes> stores_;
};

}  // namespace pycoll
