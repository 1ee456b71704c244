// The calls of one rank, a record each, for as long as somebody asks for them.
//
// Records hold readings of the processor's counter, which costs a third of a reading of the clock.
// Who takes them out gets nanoseconds: between two readings of both, ticks become time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/ticks.h"

namespace pycoll {

// One call. The layout is that of files of traces, see pycoll/observe/trace/files.py.
struct TraceRecord {
  static constexpr uint16_t kNobody = 0xFFFF, kFailed = 0x8000;
  uint64_t enter;  // in ticks; once taken, CLOCK_MONOTONIC in ns, and so are the next
  uint64_t descriptor, count;
  float total, waited;  // in the call; of that, for peers
  uint32_t iteration;   // first of the call, modulo 2^32: the same on every rank
  uint16_t site;        // its id; with kFailed added if the call raised
  uint16_t awaited;     // the peer that was waited for longest, or kNobody
};
static_assert(sizeof(TraceRecord) == 40);

// Functions of a profiler that hear when a call begins, and when it ends, on the thread that runs
// it.
struct Marks {
  void (*begin)(uint64_t descriptor, uint64_t count) = nullptr;
  void (*end)() = nullptr;
};

// A ring of records: one thread at a time adds, another one takes. What finds no room is lost, and
// counted.
class Trace {
 public:
  // `capacity` is rounded up to a power of two.
  explicit Trace(size_t capacity, Marks marks = {});

  // Around a call.
  void begin(uint64_t descriptor, uint64_t count) const {
    if (marks_.begin != nullptr) marks_.begin(descriptor, count);
  }
  void end() const {
    if (marks_.end != nullptr) marks_.end();
  }

  void add(const TraceRecord& record) {
    const uint64_t end = end_.load(std::memory_order_relaxed);
    if (end - begin_.load(std::memory_order_acquire) > mask_) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    records_[end & mask_] = record;
    __builtin_prefetch(&records_[(end + kAhead) & mask_], 1);
    end_.store(end + 1, std::memory_order_release);
  }
  // Moves at most `most` records to `to` and returns how many.
  size_t take(TraceRecord* to, size_t most, bool in_ns = true);
  size_t waiting() const { return end_.load(std::memory_order_acquire) - begin_.load(); }
  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kAhead = 8;  // of the records that are written

  size_t mask_;
  Marks marks_;
  std::unique_ptr<TraceRecord[]> records_;
  alignas(64) std::atomic<uint64_t> end_{0};
  std::atomic<uint64_t> lost_{0};
  alignas(64) std::atomic<uint64_t> begin_{0};
  const ClockReading first_;  // the anchor of all ticks
  ClockReading last_;         // at the latest take()
};

// What is known of a traced call while it runs.
struct TracedCall {
  uint64_t wait_begin = 0, waited = 0, longest = 0;  // in ticks
  uint32_t peer = 0;                                 // of the running wait
  uint16_t awaited = TraceRecord::kNobody;
};

}  // namespace pycoll
