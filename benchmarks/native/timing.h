// What the programs that measure something on their own share.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one of so many runs.
template <typename F>
double seconds_of(F&& f, size_t runs) {
  const double begin = seconds();
  for (size_t i = 0; i < runs; ++i) f();
  return (seconds() - begin) / static_cast<double>(runs);
}

inline double median(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// Fresh memory that was written to; on pages of 4 KiB if `small`.
inline char* memory(size_t nbytes, bool small = false) {
  void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) std::abort();
  if (small) madvise(found, nbytes, MADV_NOHUGEPAGE);
  return static_cast<char*>(std::memset(found, 1, nbytes));
}

}  // namespace
