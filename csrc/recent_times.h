// What something has taken lately, for choices between two ways of doing it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace pycoll {

// The last few times of one way. An interrupt or a cold cache makes it slow, nothing makes it fast:
// so the best of them counts.
class RecentTimes {
 public:
  void note(double time) { times_[count_++ % times_.size()] = time; }
  double best_or(double unknown) const {
    const auto end = times_.begin() + std::min(count_, times_.size());
    return end == times_.begin() ? unknown : *std::min_element(times_.begin(), end);
  }

 private:
  size_t count_ = 0;
  std::array<double, 4> times_{};
};

}  // namespace pycoll
