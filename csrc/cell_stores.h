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
// size: now and then some are made in the other way, and the faster way counts. Some of its peers
// may be near and some far, so the median of its times does. A copy past the caches must save more
// than it takes peers to fetch its bytes from memory. Not thread-safe.
class CellStores {
 public:
  // Whether the next copy goes past the caches.
  bool past_caches() const { return past_ != tries(); }

  // Whether it is to be timed: of tries the last ones, for the first ones find the lines of the
  // cells, which exist twice, where the other way has left them.
  bool timed() const {
    if (tries()) return copies_ - try_ >= kTries - kTimedTries;
    return copies_ < kFirstTry || copies_ % kTimedEvery == 0;
  }

  // What stores belong to that nobody times.
  bool usually_past_caches() const { return past_; }

  // Ends the copy that the above tells about; if it was timed, it took `ns` and ended at `now`.
  void note(uint64_t nbytes, uint64_t ns, uint64_t now) {
    if (timed()) {
      times_[past_caches()].note(static_cast<double>(ns) / static_cast<double>(nbytes));
      if (tries()) tried_ns_ = now;
      const bool rare = copies_ < tried_ + kRareCopies && now > tried_ns_ + kRareNs;
      if (!tries() && tried_ > 0 && rare) try_ = copies_ + 1;
    }
    if (!tries() || copies_ + 1 == try_ + kTries) {
      const double fetch = kFetchNs / static_cast<double>(nbytes) + kFetchNsPerByte;
      past_ = times_[1].median_or(kUnknown) + fetch < times_[0].median_or(kUnknown);
    }
    if (++copies_ == try_ + kTries) {
      tried_ = copies_;
      try_ += interval_;
      interval_ = std::min(2 * interval_, kTryEvery);
    }
  }

 private:
  static constexpr uint64_t kTimedEvery = 8, kTryEvery = 512, kFirstTry = 7, kSecondTry = 16;
  static constexpr uint64_t kTries = 4, kTimedTries = 2;  // in a row
  // Where copies are so rare, as when large arrays are read across but for a few calls, the next
  // try would be too far away.
  static constexpr uint64_t kRareCopies = 64, kRareNs = 20'000'000;
  static constexpr double kFetchNs = 300, kFetchNsPerByte = 0.05;  // about: bytes of no cache
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  bool tries() const { return copies_ >= try_; }

  bool past_ = false;
  uint64_t copies_ = 0, tried_ = 0, tried_ns_ = 0;    // so many before the last try ended, and when
  uint64_t try_ = kFirstTry, interval_ = kSecondTry;  // the next try; soon at first: pages are cold
  std::array<RecentTimes<7>, 2> times_;  // ns a byte: of ordinary stores, past the caches
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
