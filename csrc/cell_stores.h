// How a rank stores what it puts into its cell, where peers read it at once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace pycoll {

// Ordinary stores leave the bytes in the caches. That is best for peers nearby. But a line that a
// peer has read must be taken from it before it is written again, and if the peer's core is far
// away (in another cluster of cores, on another socket) that takes longer than to go through
// memory; docs/decisions/0009-stores-into-cells.md has the numbers.
//
// Nobody tells a rank how far its peers are, and they move. So it times its own copies: one out of
// many is made in the other way, and the better way counts, which is clearly the better one. Not
// thread-safe.
class CellStores {
 public:
  static constexpr uint64_t kLeastBytes = 32 << 10;  // of a copy that is timed

  // Whether the next copy goes past the caches.
  bool past_caches() const { return past_ != (copies_ % kProbeEvery == kProbe); }

  // What stores belong to that nobody times.
  bool usually_past_caches() const { return past_; }

  // Takes the time of the copy that past_caches() was asked about.
  void note(uint64_t nbytes, uint64_t ns) {
    const bool past = past_caches();
    Times& times = times_[past];
    times[counts_[past]++ % times.size()] = static_cast<double>(ns) / static_cast<double>(nbytes);
    ++copies_;
    past_ = best(times_[1]) < kClearly * best(times_[0]);
  }

 private:
  // An interrupt or a cold cache makes a copy slow, nothing makes it fast.
  using Times = std::array<double, 4>;  // ns a byte, of the last ones
  static double best(const Times& times) { return *std::min_element(times.begin(), times.end()); }

  static constexpr uint64_t kProbeEvery = 128, kProbe = 7;
  static constexpr double kClearly = 0.5;  // peers must fetch from memory what is not in caches
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  bool past_ = false;
  uint64_t copies_ = 0;
  std::array<uint64_t, 2> counts_{};
  std::array<Times, 2> times_{Times{}, Times{kUnknown, kUnknown, kUnknown, kUnknown}};
};

}  // namespace pycoll
