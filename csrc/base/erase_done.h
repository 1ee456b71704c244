// Removing what has ended from a list of requests, where to ask may throw.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace pycoll {

// Removes the items for which done(item) is true; the others stay in order. If done() throws, the
// items that are left are still in the list once each (std::erase_if would have some there twice,
// and a request that is freed twice is somebody else's the second time).
template <typename T, typename Done>
void erase_done(std::vector<T>& items, Done&& done) {
  size_t kept = 0, i = 0;
  const auto at = [&](size_t place) { return items.begin() + static_cast<std::ptrdiff_t>(place); };
  try {
    for (; i < items.size(); ++i) {
      if (done(items[i])) continue;
      if (kept != i) items[kept] = std::move(items[i]);
      ++kept;
    }
  } catch (...) {
    items.erase(at(kept), at(i));
    throw;
  }
  items.erase(at(kept), items.end());
}

}  // namespace pycoll
