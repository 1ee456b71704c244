// Whether a rank stores bytes in the ordinary way or past the caches.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/recent_times.h"

namespace pycoll {

// Ordinary stores leave the bytes in the caches, where whoever reads them next finds them. But a
// line that is not in this core's cache must come there before it is written: from the cache of a
// peer that has read it, which takes longer than going through memory if that core is far away, or
// from memory if nobody has touched it for long. No interface says which, and it changes. So a rank
// times its own stores of one kind and about one size: now and then it makes some in the other way,
// and the median of the last times decides. Stores past the caches must save more than it takes to
// fetch the bytes from memory, unless the bytes would be there anyway.
// docs/decisions/0009-stores-into-cells.md and 0013-stores-of-results.md have numbers. Not
// thread-safe.
class StoreChoice {
 public:
  // `kept`: caches have room for the bytes.
  explicit StoreChoice(bool kept = true) : kept_(kept), past_(!kept) {}

  // Whether the next copy (or call, or whatever is timed as one) goes past the caches.
  bool past_caches() const { return past_ != tries(); }

  // Whether it is to be timed: of tries the last ones, for the first ones find the lines of the
  // staging buffers, which exist twice, where the other way has left them.
  bool timed() const {
    if (tries()) return copies_ - try_ >= kTries - kTimedTries;
    return copies_ < kFirstTry || copies_ % kTimedEvery == 0;
  }

  // How stores go that nobody times.
  bool usually_past_caches() const { return past_; }

  // Ends the copy that the above describes; if it was timed, it took `ns`.
  void note(uint64_t nbytes, uint64_t ns) {
    if (timed()) note_time(nbytes, ns);
    if (++copies_ == try_ + kTries) {
      try_ += interval_;
      interval_ = std::min(2 * interval_, kTryEvery);
    }
  }

 private:
  static constexpr uint64_t kTimedEvery = 8, kTryEvery = 512, kFirstTry = 7, kSecondTry = 16;
  static constexpr uint64_t kTries = 4, kTimedTries = 2;           // in a row
  static constexpr double kFetchNs = 300, kFetchNsPerByte = 0.05;  // about: bytes of no cache
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  bool tries() const { return copies_ >= try_; }

  void note_time(uint64_t nbytes, uint64_t ns) {
    times_[past_caches()].note(static_cast<double>(ns) / static_cast<double>(nbytes));
    if (tries() && copies_ + 1 < try_ + kTries) return;
    const double fetch = kept_ ? kFetchNs / static_cast<double>(nbytes) + kFetchNsPerByte : 0;
    past_ = times_[1].median_or(kUnknown) + fetch < times_[0].median_or(kUnknown);
  }

  bool kept_, past_;
  uint64_t copies_ = 0;
  uint64_t try_ = kFirstTry, interval_ = kSecondTry;  // the next try; soon at first: pages are cold
  std::array<RecentTimes<7>, 2> times_;  // ns a byte: of ordinary stores, past the caches
};

// The choice for copies of every size.
class StoreChoiceBySize {
 public:
  static constexpr uint64_t kLeastBytes = 4 << 10;  // smaller copies go through the caches

  StoreChoice& operator[](uint64_t nbytes) {
    const int doublings = std::bit_width(nbytes / kLeastBytes);
    return stores_[static_cast<size_t>(std::clamp(doublings - 1, 0, kSizes - 1))];
  }

 private:
  static constexpr int kSizes = 4;  // from 4, 8, 16 and 32 KiB on
  std::array<StoreChoice, kSizes> stores_;
};

}  // namespace pycoll
