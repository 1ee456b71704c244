#include "engine/trace.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "engine/engine.h"

namespace pycoll {
namespace {

constexpr uint64_t kShortestNs = 5'000'000;  // between readings that tell how long a tick is
constexpr size_t kAtOnce = 512;              // records: they stay in the first cache

// A call as it lies in a file: no array has 2^48 elements.
struct [[gnu::packed]] PackedRecord {
  uint64_t enter_ns, descriptor;
  uint32_t count_low;
  uint16_t count_high;
  float total_ns, waited_ns;
  uint32_t iteration;
  uint16_t site, awaited;
};
static_assert(sizeof(PackedRecord) == 38);

// Writes all, or up to an error of the system, which it returns, else 0. `written`, 0 before, is
// how many bytes the file has taken.
int write_all(int file, const char* data, size_t nbytes, size_t& written) {
  while (written < nbytes) {
    const ssize_t n = ::write(file, data + written, nbytes - written);
    if (n < 0 && errno != EINTR) return errno;
    if (n > 0) written += static_cast<size_t>(n);
  }
  return 0;
}

// Ticks that one call takes; a signed number is quickly converted.
float quickly(uint64_t ticks) { return static_cast<float>(static_cast<int64_t>(ticks)); }

}  // namespace

Trace::Trace(size_t capacity, Marks marks, std::shared_ptr<TraceBell> bell)
    : mask_(std::bit_ceil(std::max<size_t>(capacity, 4)) - 1),
      records_(nullptr, {(mask_ + 1) * sizeof(TraceRecord)}),
      marks_(marks),
      stop_((mask_ + 1) / 4),
      bell_(std::move(bell)),
      first_(read_clocks()),
      last_(first_) {
  void* ring = mmap(nullptr, records_.get_deleter().nbytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  COLL_CHECK(ring != MAP_FAILED, "ArgumentError", "no memory for a trace of ", mask_ + 1,
             " calls: ", std::strerror(errno));
  records_.reset(static_cast<TraceRecord*>(ring));
}

void Trace::Unmap::operator()(TraceRecord* ring) const { munmap(ring, nbytes); }

// The bell is to ring, or there may be no room: the place at `end_` stays free, for open().
void Trace::stop() {
  const uint64_t end = end_.load(std::memory_order_relaxed) + 1, quarter = (mask_ + 1) / 4;
  const uint64_t begin = begin_.load(std::memory_order_acquire);
  if (end - begin > mask_) {
    lost_.store(lost_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return;
  }
  end_.store(end, std::memory_order_release);
  stop_ = std::min(end - end % quarter + quarter, begin + mask_ + 1);
  if (end % quarter == 0 && bell_ != nullptr) bell_->ring();
}

size_t Trace::take(TraceRecord* to, size_t most) {
  const uint64_t begin = begin_.load(std::memory_order_relaxed);
  const size_t n = std::min<size_t>(most, end_.load(std::memory_order_acquire) - begin);
  for (size_t i = 0; i < n; ++i) to[i] = records_[(begin + i) & mask_];
  begin_.store(begin + n, std::memory_order_release);
  return n;
}

int Trace::write(int file) {
  uint64_t begin = begin_.load(std::memory_order_relaxed);
  const uint64_t end = end_.load(std::memory_order_acquire);
  if (begin == end) return 0;
  ClockReading now = read_clocks();
  while (now.ns - first_.ns < kShortestNs) now = read_clocks();  // once, at the very beginning
  const Scale overall(first_, now), recent(now.ns - last_.ns < kShortestNs ? first_ : last_, now);
  const auto ns_per_tick = static_cast<float>(overall.ns_per_tick);
  std::array<PackedRecord, kAtOnce> packed;
  int error = 0;
  uint64_t unwritten = unwritten_.load(std::memory_order_relaxed);
  while (begin < end) {
    const size_t n = std::min<size_t>(end - begin, kAtOnce);
    for (size_t i = 0; i < n; ++i) {
      const TraceRecord& record = records_[(begin + i) & mask_];
      // A long call began before the latest write.
      const Scale& scale = record.enter < last_.ticks ? overall : recent;
      packed[i] = {.enter_ns = scale.ns_at(record.enter),
                   .descriptor = record.descriptor,
                   .count_low = static_cast<uint32_t>(record.count),
                   .count_high = static_cast<uint16_t>(record.count >> 32),
                   .total_ns = quickly(record.leave - record.enter) * ns_per_tick,
                   .waited_ns = quickly(record.waited) * ns_per_tick,
                   .iteration = record.iteration,
                   .site = record.site,
                   .awaited = record.awaited};
      count(record, packed[i].total_ns, packed[i].waited_ns);
    }
    begin += n;
    begin_.store(begin, std::memory_order_release);
    size_t written = 0;  // bytes
    if (file >= 0 && error == 0) {
      error = write_all(file, reinterpret_cast<const char*>(packed.data()),
                        n * sizeof(PackedRecord), written);
    }
    unwritten += n - written / sizeof(PackedRecord);
  }
  unwritten_.store(unwritten, std::memory_order_relaxed);
  last_ = now;
  return error;
}

void Trace::count(const TraceRecord& record, float total_ns, float waited_ns) {
  if (newest_ == nullptr || newest_->first != record.descriptor) {
    newest_ = &*counts_.try_emplace(record.descriptor).first;
  }
  CallCounts& counts = newest_->second;
  ++counts.calls;
  counts.elements += record.count;
  counts.failed += (record.site & TraceRecord::kFailed) != 0;
  counts.total_ns += total_ns;
  counts.waited_ns += waited_ns;
  size_t bucket = 0;
  while (bucket < CallCounts::kUpToNs.size() && total_ns > CallCounts::kUpToNs[bucket]) ++bucket;
  ++counts.by_time[bucket];
}

// The word and the sleepers are sequentially consistent, as every Bell wants it: who sleeps either
// sees the ring, or is seen. Records do not depend on them, but on `end_`.
uint32_t TraceBell::wait(uint32_t seen, uint32_t us) {
  const Bell bell{&rung_, &sleepers_};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  sleep_on(bell, seen, us);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return load_bell(bell);
}

void TraceBell::ring() {
  rung_.fetch_add(1, std::memory_order_seq_cst);
  pycoll::ring({&rung_, &sleepers_});
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
    TraceRecord& record = trace_->open();
    const uint64_t now = ticks(), waited = now - traced_.wait_begin;
    if (record.awaited == TraceRecord::kNobody || waited >= traced_.longest) {
      traced_.longest = waited;
      record.awaited = static_cast<uint16_t>(traced_.peer);
    }
    record.waited += waited;
    traced_.wait_begin = now;
  }
  if ((waiting_ & kNoted) != 0) block_->waiting_peer.store(-1, std::memory_order_release);
  waiting_ = 0;
}

}  // namespace pycoll
