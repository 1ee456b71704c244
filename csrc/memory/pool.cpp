#include "memory/pool.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <new>

#include "base/error.h"

namespace pycoll {
namespace {

constexpr uint64_t kSlab = 256 << 10;

uint64_t whole_pages(uint64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

// The next multiple of a quarter of the power of two below: less than a quarter is wasted.
uint64_t class_of(uint64_t nbytes) {
  nbytes = std::max(nbytes, Pool::kAlignment);
  const uint64_t step = std::max(std::bit_floor(nbytes - 1) / 4, Pool::kAlignment);
  const uint64_t rounded = (nbytes + step - 1) / step * step;
  return rounded < kPage ? rounded : whole_pages(rounded);
}

}  // namespace

void* Pool::alloc(uint64_t nbytes, bool* zeroed) {
  heap_.check_owner();
  const bool absurd = nbytes > heap_.bytes();
  const uint64_t least = absurd ? nbytes : whole_pages(nbytes);
  uint64_t size = absurd ? nbytes : class_of(nbytes);
  std::lock_guard lock(mutex_);
  std::vector<char*>& waiting = free_[size];
  char* block;
  if (zeroed != nullptr) *zeroed = waiting.empty();
  if (!waiting.empty()) {
    block = waiting.back();
    waiting.pop_back();
    kept_bytes_ -= size;
    if (size >= kPage) forget(size, block);
  } else {
    block = size < kPage ? carve(size) : take_pages(size, least);
    regret(size);
  }
  used_.emplace(block, Used{size, heap_.generation()});
  used_bytes_ += size;
  most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
  return block;
}

void Pool::free(void* block) {
  if (!heap_.is_owner()) return;
  std::lock_guard lock(mutex_);
  const auto it = used_.find(block);
  COLL_CHECK(it != used_.end(), "TransportError", "this block of symmetric memory is not in use");
  const auto [size, generation] = it->second;
  used_.erase(it);
  used_bytes_ -= size;
  if (generation != heap_.generation()) return;
  try {
    keep(size, static_cast<char*>(block));
  } catch (const std::bad_alloc&) {
    // Who frees cannot be told. What could not be noted is not used again.
  }
}

void Pool::keep(uint64_t size, char* block) {
  if (size > limit_) return give_back(size, block);
  std::vector<char*>& waiting = free_[size];
  if (waiting.size() == waiting.capacity()) waiting.reserve(2 * waiting.size() + 1);
  if (size >= kPage) oldest_.emplace_back(size, block);
  waiting.push_back(block);
  kept_bytes_ += size;
  while (size >= kPage && kept_bytes_ > limit_ && give_back_oldest()) {
  }
}

uint64_t Pool::size_of(const void* block) {
  std::lock_guard lock(mutex_);
  const auto it = used_.find(block);
  return it == used_.end() ? 0 : it->second.size;
}

char* Pool::carve(uint64_t nbytes) {
  if (slab_left_ < nbytes) {
    uint64_t size = kSlab;
    slab_ = take_pages(size, whole_pages(nbytes));
    slab_left_ = size;
  }
  char* block = slab_;
  slab_ += nbytes;
  slab_left_ -= nbytes;
  return block;
}

char* Pool::pages(uint64_t nbytes) {
  std::lock_guard lock(mutex_);
  return take_pages(nbytes, nbytes);
}

char* Pool::take_pages(uint64_t& nbytes, uint64_t least) {
  for (;;) {
    try {
      return heap_.at(heap_.alloc(region_, nbytes));
    } catch (const Error&) {
      if (give_back_oldest()) continue;
      if (nbytes <= least) throw;
      nbytes = least;
    }
  }
}

void Pool::forget(uint64_t size, char* block) {
  const auto last = std::find(oldest_.rbegin(), oldest_.rend(), std::pair(size, block));
  oldest_.erase(std::next(last).base());
}

bool Pool::give_back_oldest() {
  if (oldest_.empty()) return false;
  const auto [size, block] = oldest_.front();
  oldest_.pop_front();
  std::erase(free_[size], block);
  kept_bytes_ -= size;
  give_back(size, block);
  return true;
}

void Pool::give_back(uint64_t size, char* block) {
  heap_.free(heap_.offset_of(block, size).value());
  ++given_back_[size];
}

// Pages of this class were given back too early: from now on so many more are kept.
void Pool::regret(uint64_t size) {
  const auto it = given_back_.find(size);
  if (it == given_back_.end()) return;
  if (--it->second == 0) given_back_.erase(it);
  limit_ = std::max(limit_, std::min(limit_ + size, 2 * most_used_bytes_));
}

}  // namespace pycoll
