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

// One call, in a line of the cache that it has for itself. Times are in ticks.
struct alignas(64) TraceRecord {
  static constexpr uint16_t kNobody = 0xFFFF, kFailed = 0x8000;
  uint64_t enter, leave;
  uint64_t descriptor, count;
  uint64_t waited;     // of the time in the call, for peers
  uint32_t iteration;  // first of the call, modulo 2^32: the same on every rank
  uint16_t site;       // its id; with kFailed added if the call raised
  uint16_t awaited;    // the peer that was waited for longest, or kNobody
};
static_assert(sizeof(TraceRecord) == 64);

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
  // Waits for `us`, or until somebody has rung since the wait that returned `seen` (0: ever). What
  // has been seen belongs to the thread that waits: another one may take its place meanwhile.
  uint32_t wait(uint32_t seen, uint32_t us);
  void ring();

 private:
  std::atomic<uint32_t> rung_{0}, sleepers_{0};
};

// A ring of records: one thread at a time adds, another one takes. What finds no room is lost, and
// so is what a file does not take; both are counted.
class Trace {
 public:
  // `capacity` is rounded up to a power of two, of at least four; one place of it stays free. The
  // bell, if any, rings whenever another quarter of it is full.
  explicit Trace(size_t capacity, Marks marks = {}, std::shared_ptr<TraceBell> bell = nullptr);

  // Around a call.
  void begin(uint64_t descriptor, uint64_t count) const {
    if (marks_.begin != nullptr) marks_.begin(descriptor, count);
  }
  void end() const {
    if (marks_.end != nullptr) marks_.end();
  }

  // The record that the running call fills in, bit by bit, and that close() adds. There is always
  // one.
  TraceRecord& open() { return records_[end_.load(std::memory_order_relaxed) & mask_]; }
  void close(const TraceRecord& record) {
    __builtin_prefetch(&record + kAhead, 1);  // past the end of the ring it does nothing
    const uint64_t end = end_.load(std::memory_order_relaxed) + 1;
    if (end == stop_) [[unlikely]]
      return stop();
    end_.store(end, std::memory_order_release);
  }

  // Moves at most `most` records to `to` and returns how many.
  size_t take(TraceRecord* to, size_t most);
  // Counts what there is and writes it to a file, as pycoll/observe/trace/files.py reads it; to
  // none if it is -1. Returns 0, or the error of the system, after which nothing must be written to
  // this file any more: it may end in the middle of a record.
  int write(int file);
  bool empty() const { return end_.load(std::memory_order_acquire) == begin_.load(); }
  // All that write() has counted, by descriptor.
  const std::unordered_map<uint64_t, CallCounts>& counts() const { return counts_; }

  uint64_t lost() const {
    return lost_.load(std::memory_order_relaxed) + unwritten_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kAhead = 8;  // of the open record

  struct Unmap {
    size_t nbytes;
    void operator()(TraceRecord* ring) const;
  };

  void stop();
  void count(const TraceRecord& record, float total_ns, float waited_ns);

  // Of the thread that adds: it touches no other line but the record's.
  alignas(64) uint64_t mask_;
  // Not from malloc, which would give the arrays of the program other places than without a trace.
  std::unique_ptr<TraceRecord[], Unmap> records_;
  Marks marks_;
  std::atomic<uint64_t> end_{0};
  uint64_t stop_;  // where `end_` must not go without a look: at the bell, and for room
  std::atomic<uint64_t> lost_{0};
  // Of the one that takes.
  alignas(64) std::atomic<uint64_t> begin_{0};
  std::atomic<uint64_t> unwritten_{0};
  const std::shared_ptr<TraceBell> bell_;
  const ClockReading first_;  // the anchor of all ticks
  ClockReading last_;         // at the latest write()
  std::unordered_map<uint64_t, CallCounts> counts_;
  std::pair<const uint64_t, CallCounts>* newest_ = nullptr;  // of counts_
};

// What is known of a traced call while it runs, but for its record; in ticks.
struct TracedCall {
  uint64_t wait_begin = 0;  // 0: waits are not timed
  uint64_t longest = 0;     // if it has waited
  uint32_t peer = 0;        // of the running wait
};

}  // namespace pycoll
