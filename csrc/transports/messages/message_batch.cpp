// Running calls over messages: one by one, or as a batch of which several are under way at once.
#include <algorithm>
#include <utility>

#include "transports/messages/message_engine.h"

namespace pycoll {
namespace {

constexpr uint32_t kStepsBetweenChecks = 1024;
constexpr uint32_t kYieldsBetweenChecks = 16;
constexpr uint64_t kAnswerNs = 5'000'000;
constexpr uint64_t kCheckedBytes = 64 << 10;  // a look at every peer costs as much as some KiB

struct EngineAndTransport {
  ReentrantMutex& engine;
  Transport& transport;

  bool try_lock() {
    if (!engine.try_lock()) return false;
    if (transport.try_lock()) return true;
    engine.unlock();
    return false;
  }
  void lock() {
    engine.lock();
    transport.lock();
  }
  void unlock() {
    transport.unlock();
    engine.unlock();
  }
};

}  // namespace

void MessageEngine::execute(const Job& job, bool signals) {
  EngineAndTransport both{mutex_, *api_};  // which all that follows would lock again and again
  const LockedWhileSpinning locked(both, job.call->tiny);
  show(job.call->descriptor, job.call->count, job.site);
  try {
    in_batch([&] {
      add_to_batch(job, signals);
      drive([this] { return batch_.front().over; });
      check_late_notices(*job.call);
      pass(*job.call);
    });
  } catch (...) {
    shown(false);
    throw;
  }
  shown(true);
  const Locked lock(mutex_);  // notices come on threads that wait for messages, too
  batch_.clear();
  end();
}

void MessageEngine::trace(std::shared_ptr<Trace> trace) {
  check_usable();
  const Use use(user_, rank_);
  settle();
  timed_ = trace != nullptr;
  trace_ = std::move(trace);
}

uint64_t MessageEngine::count_waits(bool on) {
  timed_ = on;
  return std::exchange(waited_, 0);
}

void MessageEngine::show(uint64_t descriptor, uint64_t count, uint32_t site) {
  if (board_ != nullptr) board_->begin_call(seq_, descriptor, count, site);
  if (trace_ == nullptr) return;
  trace_->begin(descriptor, count);
  waited_ = 0;
  trace_->open() = {.enter = ticks(),
                    .leave = 0,
                    .descriptor = descriptor,
                    .count = count,
                    .waited = 0,
                    .iteration = static_cast<uint32_t>(seq_),
                    .site = static_cast<uint16_t>(site),
                    .awaited = TraceRecord::kNobody};
  traced_ = true;
}

void MessageEngine::shown(bool done) {
  if (board_ != nullptr) board_->end_call(done);
  if (trace_ == nullptr || !std::exchange(traced_, false)) return;
  TraceRecord& record = trace_->open();
  record.leave = ticks();
  trace_->end();
  record.waited = waited_;
  if (!done) record.site |= TraceRecord::kFailed;
  trace_->close(record);
}

// Puts a call behind those under way, and lets it begin.
void MessageEngine::add_to_batch(const Job& job, bool signals) {
  const Locked lock(mutex_);
  if (batch_.empty()) begin(job, signals);
  const uint32_t place = batch_.empty() ? 0 : (batch_.back().place + 1) % kBatch;
  batch_.push_back({make_task(rooms_[place], job, seq_ + batch_.size()), false, place});
  advance_batch();
}

MessageEngine::RoomedTask MessageEngine::make_task(Room& room, const Job& job, uint64_t seq) {
  const BoundCall& call = *job.call;
  const MessageTask::Turn turn{seq, unproven_.mixed(call.check), job.proven || early_};
  if (call.tiny) {
    auto* task = new (room.packets) PacketTask(link_, call, job.in, job.out, turn, room.of_packets);
    return RoomedTask(task);
  }
  auto* task = new (room.payload) PayloadTask(link_, call, job.in, job.out, turn, room.of_payload);
  return RoomedTask(task);
}

void MessageEngine::advance_batch() {
  for (BatchCall& entry : batch_) {
    const uint64_t before = entry.task->progress();
    if (!entry.over) entry.over = entry.task->advance();
    moved_ += entry.task->progress() - before;
  }
}

// Moves the batch until something is ready.
template <typename F>
void MessageEngine::drive(F&& ready) {
  uint32_t steps = 0, yields = 0;
  uint64_t begin = 0;  // of the running wait
  const auto check = [&](Pulse pulse) {
    const Locked lock(mutex_);
    const auto late = [](const BatchCall& entry) { return !entry.over; };
    const auto entry = std::find_if(batch_.begin(), batch_.end(), late);
    check_call(entry == batch_.end() ? *batch_.back().task : *entry->task, pulse);
    return false;
  };
  for (bool found = ready(); !found;) {
    const uint64_t before = moved_;
    wait_until(
        policy_, bell(),
        [&] {
          const Locked lock(mutex_);
          advance_batch();
          found = ready();
          return found || moved_ != before;
        },
        [&](Pulse pulse) {
          if (timed_ && begin == 0) begin = ticks();
          const bool skipped = pulse == Pulse::kYield && ++yields % kYieldsBetweenChecks != 0;
          return skipped ? false : check(pulse);
        });
    if (begin != 0) waited_ += ticks() - std::exchange(begin, 0);
    if (!found && ++steps % kStepsBetweenChecks == 0) check(Pulse::kSlice);
  }
}

// A peer that gave up this call, and sent a notice, may have changed what it was still sending.
// Small messages have left its memory before its program can change them.
void MessageEngine::check_late_notices(const BoundCall& call) {
  if (call.in_bytes + call.out_bytes < kCheckedBytes) return;
  const Locked lock(mutex_);
  receive_notices(world_size_);
  if (failed_) raise_failure();
  if (must_conclude()) conclude();
}

// Runs a part of a batch; a failure cancels all that is under way.
template <typename F>
void MessageEngine::in_batch(F&& part) {
  try {
    attempt([&] {
      if (batch_error_ != nullptr) std::rethrow_exception(std::exchange(batch_error_, nullptr));
      part();
    });
  } catch (...) {
    batch_.clear();
    throw;
  }
}

void MessageEngine::start(const BoundCall& call, const void* in, void* out, uint32_t site,
                          double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  if (batch_.empty()) settle();
  in_batch([&] {
    // Packets go by the number of the call alone: there may be only one call that uses them.
    const auto passed = [&](const BatchCall& entry) {
      return entry.over || (entry.task->agreed() && !entry.task->call().tiny && !call.tiny);
    };
    if (!batch_.empty()) {
      drive([&] { return std::all_of(batch_.begin(), batch_.end(), passed); });
    }
    add_to_batch({&call, in, out, site, timeout_s, !batch_.empty()}, true);
  });
}

void MessageEngine::enter(uint64_t descriptor, uint64_t count, uint32_t site) {
  const Locked lock(mutex_);
  in_call_ = true;
  waiting_ = {};
  last_descriptor_ = descriptor;
  last_count_ = count;
  last_check_ = 0;  // a part of the descriptor tells these calls apart
  last_site_ = site;
}

bool MessageEngine::progress_batch() {
  if (batch_.empty() || batch_error_ != nullptr) {
    answer();
    return false;
  }
  try {
    const Locked lock(mutex_);
    advance_batch();
  } catch (...) {
    batch_error_ = std::current_exception();
  }
  return true;
}

// A rank that waits inside its host sends a record to ranks on other hosts that report a failure,
// and ends that wait: those it waits for may come late, and hear of it later still.
void MessageEngine::answer() {
  const uint64_t now = coarse_ns();
  if (now < answered_ns_ + kAnswerNs || api_->ended()) return;
  answered_ns_ = now;
  bool ends = false;
  {
    const Locked lock(mutex_);
    try {
      receive_notices(kPeersPerLook);
      if (someone_fails_ && !failed_ && records_[rank_].kind == 0) {
        records_[rank_] = own_record(Notice::kRecord);
        notify_all(records_[rank_]);
        flush(kRecordsWaitNs / 10);
      }
    } catch (const Error&) {  // those who wait for messages will report it
    }
    ends = failed_ || must_conclude();
  }
  if (ends && end_wait_) end_wait_();
}

void MessageEngine::finish() {
  const Use use(user_, rank_);
  in_batch([&] {
    drive([this] { return batch_.front().over; });
    check_late_notices(batch_.front().task->call());
  });
  const Locked lock(mutex_);
  batch_.erase(batch_.begin());
  end();
  in_call_ = !batch_.empty();
  deadline_.clear();
}

void MessageEngine::cancel_batch() {
  const Locked lock(mutex_);
  batch_.clear();
  batch_error_ = nullptr;
}

}  // namespace pycoll
