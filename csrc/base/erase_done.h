// Removing finished requests from a list, where testing one may throw.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace pycoll {

// Removes the items for which done(item) is true; the others stay in order. If done() throws, the
// remaining items are in the list once each (std::erase_if would leave some there twice, and MPI
// may have given the handle of a freed request to another one).
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
