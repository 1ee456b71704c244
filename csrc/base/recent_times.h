// The last few times that one way of doing something has taken, for choices between two ways.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace pycoll {

// Where the work is always the same the best time counts: an interrupt or a cold cache makes it
// slow, nothing makes it fast. Where the work differs the median does.
template <size_t kKept>
class RecentTimes {
 public:
  void note(double time) { times_[count_++ % times_.size()] = time; }
  double best_or(double unknown) const {
    return count_ == 0 ? unknown : *std::min_element(times_.begin(), times_.begin() + known());
  }
  double median_or(double unknown) const {
    if (count_ == 0) return unknown;
    auto sorted = times_;
    std::sort(sorted.begin(), sorted.begin() + known());
    return (sorted[size_t(known() - 1) / 2] + sorted[size_t(known()) / 2]) / 2;
  }

 private:
  ptrdiff_t known() const { return static_cast<ptrdiff_t>(std::min(count_, kKept)); }

  size_t count_ = 0;
  std::array<double, kKept> times_{};
};

}  // namespace pycoll
