#include "engine/trace.h"

#include <algorithm>
#include <bit>

#include "engine/engine.h"

namespace pycoll {

Trace::Trace(size_t capacity)
    : mask_(std::bit_ceil(std::max<size_t>(capacity, 2)) - 1),
      records_(std::make_unique<TraceRecord[]>(mask_ + 1)) {}

size_t Trace::take(TraceRecord* to, size_t most) {
  const uint64_t begin = begin_.load(std::memory_order_relaxed);
  const size_t n = std::min<size_t>(most, end_.load(std::memory_order_acquire) - begin);
  for (size_t i = 0; i < n; ++i) to[i] = records_[(begin + i) & mask_];
  begin_.store(begin + n, std::memory_order_release);
  return n;
}

void Engine::trace(std::shared_ptr<Trace> trace) {
  check_usable();
  const Use use(user_, rank_);
  drain();  // no thread is in a call now
  trace_ = std::move(trace);
  attended_ = trace_ != nullptr || other_work_ != nullptr;
  if (trace_ != nullptr) {
    state_.fetch_or(kTraced);
  } else {
    state_.fetch_and(static_cast<uint8_t>(~kTraced));
  }
}

// Before a wait with other work under way, or in a traced call. Returns how to wait.
const WaitPolicy& Engine::attend(uint32_t peer) {
  // For waits with other work under way, which does not wake this thread.
  static constexpr WaitPolicy kBusy = {
      .spins = 50, .yield_us = 20'000, .first_slice_us = 50, .last_slice_us = 100};
  if (trace_ != nullptr) {
    traced_.peer = peer;
    traced_.wait_begin_ns = now_ns();
    waiting_ |= kTimed;
  }
  return other_work_ && other_work_() ? kBusy : policy_;
}

// After a wait that others may see, or that is timed.
void Engine::end_of_wait() {
  if ((waiting_ & kTimed) != 0) {
    const uint64_t waited = now_ns() - traced_.wait_begin_ns;
    traced_.waited_ns += waited;
    if (waited >= traced_.longest_ns) {
      traced_.longest_ns = waited;
      traced_.awaited = static_cast<uint16_t>(traced_.peer);
    }
  }
  if ((waiting_ & kNoted) != 0) block_->waiting_peer.store(-1, std::memory_order_release);
  waiting_ = 0;
}

}  // namespace pycoll
