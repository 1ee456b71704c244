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
// peer that has read it, and if the peer's core is far away (in another cluster of cores, on
// another socket) that takes longer than to go through memory; or from memory itself, if nobody has
// touched it for long. docs/decisions/0009-stores-into-cells.md and 0013-stores-of-results.md have
// numbers.
//
// Nobody tells a rank how far its peers are, or what caches still hold, and that changes. So it
// times its own stores of one kind and about one size: now and then some are made in the other way,
// and the faster way counts. Some of the lines may be near and some far, so the median of the times
// does. Past the caches must save more than it takes to fetch the bytes from memory, unless that is
// where the bytes would be anyway. Not thread-safe.
class StoreChoice {
 public:
  // `kept`: caches have room for the bytes.
  explicit StoreChoice(bool kept = true) : kept_(kept), past_(!kept), before_(!kept) {}

  // Whether the next copy (or call, or whatever is timed as one) goes past the caches.
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
    if (timed()) note_time(nbytes, ns, now);
    if (++copies_ == try_ + kTries) {
      rare_after_ = past_ != before_ ? kTimedEvery : std::min(2 * rare_after_, kRareAfter);
      before_ = past_;
      tried_ = copies_;
      try_ += interval_;
      interval_ = std::min((hopeless_ ? 4 : 2) * interval_, kTryEvery);
    }
  }

 private:
  static constexpr uint64_t kTimedEvery = 8, kTryEvery = 512, kFirstTry = 7, kSecondTry = 16;
  static constexpr uint64_t kTries = 4, kTimedTries = 2;  // in a row
  // Where fewer than kRareCopies are made in kRareNs, as when large arrays are read across but for
  // a few calls, the next try would be too far away. It comes then after eight copies, after twice
  // as many if it has changed nothing, and so on.
  static constexpr uint64_t kRareCopies = 64, kRareNs = 20'000'000, kRareAfter = 256;
  static constexpr double kFetchNs = 300, kFetchNsPerByte = 0.05;  // about: bytes of no cache
  static constexpr double kHopeless = 1.5;  // so much slower ways are tried more seldom at first
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  bool tries() const { return copies_ >= try_; }

  bool rare(uint64_t now) const {
    const uint64_t copies = copies_ - tried_, ns = now - tried_ns_;
    return copies >= rare_after_ && ns > std::max(kRareNs, copies * (kRareNs / kRareCopies));
  }

  void note_time(uint64_t nbytes, uint64_t ns, uint64_t now) {
    times_[past_caches()].note(static_cast<double>(ns) / static_cast<double>(nbytes));
    if (tries()) tried_ns_ = now;
    if (!tries() && tried_ > 0 && rare(now)) try_ = copies_ + 1;
    if (tries() && copies_ + 1 < try_ + kTries) return;
    const double fetch = kept_ ? kFetchNs / static_cast<double>(nbytes) + kFetchNsPerByte : 0;
    const double past = times_[1].median_or(kUnknown), ordinary = times_[0].median_or(kUnknown);
    past_ = past + fetch < ordinary;
    hopeless_ = std::max(past, ordinary) > kHopeless * std::min(past, ordinary);
  }

  bool kept_, past_, hopeless_ = false;
  bool before_;  // what was chosen before the last try
  uint64_t rare_after_ = kTimedEvery;
  uint64_t copies_ = 0, tried_ = 0, tried_ns_ = 0;    // so many before the last try ended, and when
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
