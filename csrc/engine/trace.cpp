#include "engine/trace.h"

#include <algorithm>
#include <bit>
#include <span>

#include "engine/engine.h"

namespace pycoll {
namespace {

constexpr uint64_t kShortestNs = 5'000'000;  // between readings that tell how long a tick is

}  // namespace

Trace::Trace(size_t capacity, Marks marks)
    : mask_(std::bit_ceil(std::max<size_t>(capacity, 2)) - 1),
      marks_(marks),
      records_(std::make_unique<TraceRecord[]>(mask_ + 1)),
      first_(read_clocks()),
      last_(first_) {}

size_t Trace::take(TraceRecord* to, size_t most, bool in_ns) {
  const uint64_t begin = begin_.load(std::memory_order_relaxed);
  const size_t n = std::min<size_t>(most, end_.load(std::memory_order_acquire) - begin);
  for (size_t i = 0; i < n; ++i) to[i] = records_[(begin + i) & mask_];
  begin_.store(begin + n, std::memory_order_release);
  if (!in_ns || n == 0) return n;
  ClockReading now = read_clocks();
  while (now.ns - first_.ns < kShortestNs) now = read_clocks();  // once, at the very beginning
  const Scale overall(first_, now), recent(now.ns - last_.ns < kShortestNs ? first_ : last_, now);
  for (TraceRecord& record : std::span(to, n)) {
    // A long call began before the latest take.
    record.enter = (record.enter < last_.ticks ? overall : recent).ns_at(record.enter);
    record.total *= static_cast<float>(overall.ns_per_tick);
    record.waited *= static_cast<float>(overall.ns_per_tick);
  }
  last_ = now;
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
  if (traced_.wait_begin != 0 && !call_->tiny) {  // of a tiny one see check_call
    traced_.wait_begin = ticks();
    traced_.peer = peer;
    waiting_ |= kTimed;
  }
  return other_work_ && other_work_() ? kBusy : policy_;
}

// After a wait that others may see, or that is timed.
void Engine::end_of_wait() {
  if ((waiting_ & kTimed) != 0) {
    const uint64_t now = ticks(), waited = now - traced_.wait_begin;
    traced_.wait_begin = now;
    traced_.waited += waited;
    if (waited >= traced_.longest) {
      traced_.longest = waited;
      traced_.awaited = static_cast<uint16_t>(traced_.peer);
    }
  }
  if ((waiting_ & kNoted) != 0) block_->waiting_peer.store(-1, std::memory_order_release);
  waiting_ = 0;
}

}  // namespace pycoll
