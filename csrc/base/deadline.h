// When a wait has taken too long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/wait.h"

namespace pycoll {

// When this thread has last gone to wait for something else, such as Python's lock, and come back:
// that time counts, too.
inline constinit thread_local uint64_t went_away_ns = 0, came_back_ns = 0;

// A limit of the time that this process waits. That in which it is stopped does not count: whoever
// suspends a job stops its peers, too, and all of them have to come back first.
class Deadline {
 public:
  Deadline() = default;  // not set

  // `timeout_s` from now; for infinity far in the future.
  explicit Deadline(double timeout_s)
      : seen_ns_(now_ns()),
        at_ns_(seen_ns_ + static_cast<uint64_t>(std::clamp(timeout_s, 0.0, kForever) * 1e9)) {}

  bool is_set() const { return at_ns_ != 0; }
  void clear() { at_ns_ = 0; }

  // Whether it has passed; to be asked at every pulse of a wait.
  bool passes() {
    const uint64_t now = now_ns(),
                   elsewhere = went_away_ns >= seen_ns_ ? came_back_ns - went_away_ns : 0;
    const uint64_t gap = now - seen_ns_ - elsewhere;
    if (gap > kStoppedNs) at_ns_ += gap;
    seen_ns_ = now;
    return passed();
  }
  // What `passes` has said last.
  bool passed() const { return seen_ns_ >= at_ns_; }
  double left_s() { return passes() ? 0 : 1e-9 * static_cast<double>(at_ns_ - seen_ns_); }

 private:
  static constexpr double kForever = 1e9;                // seconds
  static constexpr uint64_t kStoppedNs = 1'000'000'000;  // pulses come every 10 ms
  uint64_t seen_ns_ = 0, at_ns_ = 0;
};

}  // namespace pycoll
