// The calls of one rank, a record each, for as long as somebody asks for them.
//
// Records hold readings of the processor's counter, which costs a third of a reading of the clock.
// As they are written to a file ticks become nanoseconds, between two readings of both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/ticks.h"
#include "base/wait.h"

namespace pycoll {

// One call. Times are in ticks.
struct TraceRecord {
  static constexpr uint16_t kNobody = 0xFFFF, kFailed = 0x8000;
  uint64_t enter;
  uint64_t descriptor, count;
  float total, waited;  // in the call; of that, for peers
  uint32_t iteration;   // first of the call, modulo 2^32: the same on every rank
  uint16_t site;        // its id; with kFailed added if the call raised
  uint16_t awaited;     // the peer that was waited for longest, or kNobody
};
static_assert(sizeof(TraceRecord) == 40);

// The calls with one descriptor.
struct CallCounts {
  // How many took at most so long each; the last entry of `by_time` has all others.
  static constexpr std::array kUpToNs = {1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10};
  uint64_t calls = 0, elements = 0, failed = 0;
  double total_ns = 0, waited_ns = 0;
  std::array<uint64_t, kUpToNs.size() + 1> by_time{};
};

// Functions of a profiler that hear when a call begins, and when it ends, on the thread that runs
// it.
struct Marks {
  void (*begin)(uint64_t descriptor, uint64_t count) = nullptr;
  void (*end)() = nullptr;
};

// Wakes the thread that writes traces.
class TraceBell {
 public:
  // Waits for `us` or until somebody has rung since the latest wait. For one thread.
  void wait(uint32_t us);
  void ring();

 private:
  std::atomic<uint32_t> rung_{0}, sleepers_{0};
  uint32_t seen_ = 0;  // of rung_
};

// A ring of records: one thread at a time adds, another one takes. What finds no room is lost, and
// counted.
class Trace {
 public:
  // `capacity` is rounded up to a power of two, of at least four. The bell, if any, rings whenever
  // another quarter of it is full.
  explicit Trace(size_t capacity, Marks marks = {}, std::shared_ptr<TraceBell> bell = nullptr);

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
    if ((~end & (mask_ >> 2)) == 0 && bell_ != nullptr) [[unlikely]]
      bell_->ring();
  }

  // Moves at most `most` records to `to` and returns how many.
  size_t take(TraceRecord* to, size_t most);
  // Counts what there is and writes it to a file, as pycoll/observe/trace/files.py reads it.
  // Returns 0, or the error of the system.
  int write(int file);
  bool empty() const { return end_.load(std::memory_order_acquire) == begin_.load(); }
  // All that write() has counted, by descriptor.
  const std::unordered_map<uint64_t, CallCounts>& counts() const { return counts_; }

  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kAhead = 8;  // of the records that are written

  struct Unmap {
    size_t nbytes;
    void operator()(TraceRecord* ring) const;
  };

  void count(const TraceRecord& record, float total_ns, float waited_ns);

  size_t mask_;
  Marks marks_;
  std::shared_ptr<TraceBell> bell_;
  // Not from malloc, which would give the arrays of the program other places than without a trace.
  std::unique_ptr<TraceRecord[], Unmap> records_;
  alignas(64) std::atomic<uint64_t> end_{0};
  std::atomic<uint64_t> lost_{0};
  alignas(64) std::atomic<uint64_t> begin_{0};
  const ClockReading first_;  // the anchor of all ticks
  ClockReading last_;         // at the latest write()
  std::unordered_map<uint64_t, CallCounts> counts_;
  std::pair<const uint64_t, CallCounts>* newest_ = nullptr;  // of counts_
};

// What is known of a traced call while it runs; in ticks.
struct TracedCall {
  uint64_t wait_begin = 0;  // 0: waits are not timed
  uint64_t waited = 0, longest = 0;
  uint32_t peer = 0;  // of the running wait
  uint16_t awaited = TraceRecord::kNobody;
};

}  // namespace pycoll
