// What something has taken lately, for choices between two ways of doing it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace pycoll {

// The last few times of one way. Of what is always the same the best counts: an interrupt or a cold
// cache makes it slow, nothing makes it fast. Of what differs the median does.
template <size_t kKept>
class RecentTimes {
 public:
  void note(double time) { times_[count_++ % times_.size()] = time; }
  double best_or(double unknown) const {
    const auto end = times_.begin() + std::min(count_, times_.size());
    return end == times_.begin() ? unknown : *std::min_element(times_.begin(), end);
  }
  double median_or(double unknown) const {
    const size_t known = std::min(count_, times_.size());
    if (known == 0) return unknown;
    auto sorted = times_;
    std::sort(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(known));
    return (sorted[(known - 1) / 2] + sorted[known / 2]) / 2;
  }

 private:
  size_t count_ = 0;
  std::array<double, kKept> times_{};
};

}  // namespace pycoll
