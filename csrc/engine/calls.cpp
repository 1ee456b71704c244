// Around the iterations of an engine: making it, which plan a call runs, its threads and queue,
// leaving a failed call, closing.
#include <algorithm>
#include <cmath>

#include "base/liveness.h"
#include "engine/engine.h"

namespace pycoll {
namespace {

constexpr uint32_t kMinOperands = 64;
constexpr size_t kMaxChoices = 1024;
constexpr uint64_t kSmallBytes = 64
                                 << 10;  // of a call whose wait is worth less than waking a thread
constexpr uint64_t kLeaveNs = 500'000'000;
constexpr char kNotHere[] = "this call belongs to the parent process";

}  // namespace

Engine::Engine(std::shared_ptr<ControlSegment> control, std::shared_ptr<Heap> heap, uint32_t rank,
               const EngineOptions& options)
    : iteration_(control->geometry().start_iteration),
      rank_(rank),
      world_size_(control->geometry().world_size),
      max_operands_(std::max(kMinOperands, 2 * world_size_)),
      control_(std::move(control)),
      heap_(std::move(heap)),
      options_(options),
      sharing_(sharing_own_cores(world_size_)),
      policy_(default_policy(sharing_)),
      faults_(control_, rank, options.threads_as_ranks) {
  peers_ = std::make_unique<Peer[]>(world_size_);
  for (uint32_t r = 0; r < world_size_; ++r) {
    peers_[r].seen = r == rank_ ? UINT64_MAX : control_->geometry().start_iteration - 1;
  }
  srcs_ = std::make_unique<const void*[]>(max_operands_);
  dsts_ = std::make_unique<void*[]>(max_operands_);
  control_->claim(rank_);
  block_ = &control_->block(rank_);
  site("");
  if (options_.threads_as_ranks) return;
  try {
    peer_memory_ = std::make_unique<PeerMemory>(control_, rank_);
    alive_ = std::make_unique<LivenessHold>(&block_->liveness);
  } catch (const std::exception& error) {  // the slot is taken, so the peers would wait for us
    leave(error.what());
    throw;
  }
}

Engine::~Engine() {
  if (fork_guard_.at_home() && !closed() && helper() != nullptr && !helper()->idle()) {
    faults_.set(Cause::kAbort, rank_, iteration(), "dropped with calls in flight");
  }
  try {
    close();
  } catch (const std::exception&) {  // what is left to release does not depend on it
    if (helper() != nullptr) helper()->stop();
  }
}

void Engine::check_usable() const {
  COLL_CHECK(fork_guard_.at_home(), "ForkedError", "rank ", rank_,
             "'s communicator was made before this process was forked and belongs to the parent; "
             "make a new one in the child, or start it by spawn");
  if ((state_.load(std::memory_order_relaxed) & (kClosed | kLeft)) != 0) [[unlikely]] {
    throw_error("CommClosed", "rank ", rank_, " has ", closed() ? "closed" : "left",
                " this communicator");
  }
}

std::shared_ptr<const BoundCall> Engine::bind(Binding binding) const {
  return bind_call(std::move(binding), control_->geometry(), control_->cookie(), rank_,
                   max_operands_);
}

uint32_t Engine::site(std::string_view text) {
  std::lock_guard lock(mutex_);
  const auto known = sites_.find(std::string(text));
  if (known != sites_.end()) return known->second;
  const uint32_t id = block_->sites.load(std::memory_order_relaxed);
  if (id == kSites) return kSites - 1;
  store_text(block_->site_text[id], kSiteBytes, id == kSites - 1 ? "(another call site)" : text);
  block_->sites.store(id + 1, std::memory_order_release);
  sites_.emplace(text, id);
  return id;
}

// Once in each of the few places that make calls: so the hot one costs no call more.
[[gnu::always_inline]] inline Engine::Job Engine::prepare(const BoundCall& call, const void* in,
                                                          void* out, uint32_t site,
                                                          double timeout_s) {
  Job job{&call, in, out, 0, 0, site, timeout_s, true, nullptr};
  if (!call.plan->direct || call.across) return job;
  const auto offset = [&](const void* array, uint64_t nbytes) -> uint64_t {
    if (array == nullptr) return 0;
    const auto found = heap_ == nullptr ? std::nullopt : heap_->offset_of(array, nbytes);
    COLL_CHECK(found.has_value(), "ArgumentError", "an array of ", nbytes,
               " bytes does not lie in symmetric memory, where peers could reach it");
    return *found;
  };
  job.in_offset = offset(in, call.in_bytes);
  if (!call.input_only) job.out_offset = offset(out, call.out_bytes);
  return job;
}

[[gnu::always_inline]] inline void Engine::execute(const Job& job) {
  if (job.call->alternative != nullptr) return run_with_choice(job);
  choice_.reset();
  run_call(job, *job.call);
}

void Engine::execute_traced(const Job& job) {
  if (trace_ == nullptr) return execute(job);  // it ended while the call was queued
  trace_->begin(job.call->descriptor, job.call->count);
  TraceRecord& record = trace_->open();
  record.waited = 0;
  record.iteration = static_cast<uint32_t>(iteration());
  record.site = static_cast<uint16_t>(job.site);
  record.awaited = TraceRecord::kNobody;
  record.enter = traced_.wait_begin = ticks();
  const auto note = [&] {
    record.leave = ticks();
    trace_->end();
    record.descriptor = descriptor_;  // of an alternative, if that was run
    record.count = count_;
    traced_.wait_begin = 0;
    trace_->close(record);
  };
  try {
    execute(job);
  } catch (...) {
    record.site |= TraceRecord::kFailed;
    note();
    throw;
  }
  note();
}

void Engine::run(const BoundCall& call, const void* in, void* out, uint32_t site, double timeout_s,
                 std::shared_ptr<const Detours> detours) {
  if (usual()) [[likely]]
    return run_now<false>(call, in, out, site, timeout_s, std::move(detours));
  check_usable();
  run_now<true>(call, in, out, site, timeout_s, std::move(detours));
}

template <bool kTrace>
inline void Engine::run_now(const BoundCall& call, const void* in, void* out, uint32_t site,
                            double timeout_s, std::shared_ptr<const Detours>&& detours) {
  const Use use(user_, rank_);
  Job job = prepare(call, in, out, site, timeout_s);
  job.detours = std::move(detours);
  if (helper() == nullptr || helper()->idle()) [[likely]]
    return kTrace ? execute_traced(job) : execute(job);
  run_queued([this, job](bool helped) mutable {
    job.signals = helped;
    kTrace ? execute_traced(job) : execute(job);
  });
}

Engine::Ticket Engine::submit(std::shared_ptr<const BoundCall> call, const void* in, void* out,
                              uint32_t site, double timeout_s,
                              std::shared_ptr<const Detours> detours) {
  if (usual()) [[likely]]
    return queue<false>(std::move(call), in, out, site, timeout_s, std::move(detours));
  check_usable();
  return queue<true>(std::move(call), in, out, site, timeout_s, std::move(detours));
}

template <bool kTrace>
inline Engine::Ticket Engine::queue(std::shared_ptr<const BoundCall>&& call, const void* in,
                                    void* out, uint32_t site, double timeout_s,
                                    std::shared_ptr<const Detours>&& detours) {
  const Use use(user_, rank_);
  Job job = prepare(*call, in, out, site, timeout_s);
  job.detours = std::move(detours);
  const bool small = call->in_bytes + call->out_bytes <= kSmallBytes;
  return started_helper().submit(
      [this, job, call = std::move(call)](bool helped) mutable {
        job.signals = helped;
        kTrace ? execute_traced(job) : execute(job);
      },
      small ? HelperThread::Start::kSoon : HelperThread::Start::kNow);
}

// Runs a call that has an alternative, or the alternative.
void Engine::run_with_choice(const Job& job) {
  const uint32_t key = job.call->fingerprint;
  const auto known = choices_.find(key);
  choice_ = known == choices_.end() ? CopyChoice{} : known->second;
  reported_ = choice_->begin(peer_memory_ != nullptr && peer_memory_->able());
  const uint64_t begin = choice_->timed() ? now_ns() : 0;
  first_iteration_ = iteration();
  entry_wait_ns_ = 0;
  run_call(job, choice_->reads() ? *job.call->alternative : *job.call);
  if (peer_memory_ != nullptr) peer_memory_->probe();
  choice_->end(choice_->timed() ? now_ns() - begin - entry_wait_ns_ : 0);
  // Only calls that have succeeded count, so all ranks remember, and forget, the same.
  if (known == choices_.end() && choices_.size() == kMaxChoices) choices_.clear();
  choices_.insert_or_assign(key, *choice_);
}

bool Engine::reads(const BoundCall& call) const {
  const auto known = choices_.find(call.fingerprint);
  return known != choices_.end() && known->second.reads();
}

void Engine::run_call(const Job& job, const BoundCall& call) {
  if (!call.plan->direct) return run_segments(job, call);
  block_->inside.store(iteration(), std::memory_order_seq_cst);  // before it looks for an abort
  try {
    run_segments(job, call);
  } catch (...) {
    leave_direct_call();
    throw;
  }
  block_->inside.store(0, std::memory_order_release);
}

// Leaves a direct call that has failed. Peers may be reading and writing our arrays, which belong
// to the caller again when we return: peers in the call get time to notice and to leave. One that
// does not, because it is stopped, may go on at any time, so the memory of our arrays is not used
// again. After a refusal all have left; see quiesce.
void Engine::leave_direct_call() {
  const uint64_t call = block_->inside.exchange(0, std::memory_order_seq_cst);
  const bool entered = published_ && step_ >= kEntered;
  if (iteration() == call && !entered) return;  // no peer knows where our arrays are
  if (!faults_.pending()) return;
  const uint64_t end = now_ns() + kLeaveNs;
  bool alone = true;
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    const auto& inside = control_->block(peer).inside;
    alone &= wait_until(
        kPatient, control_->bell(peer, 0),
        [&] {
          return inside.load(std::memory_order_seq_cst) != call ||
                 owner_died(&control_->block(peer).liveness);
        },
        [&](Pulse) { return now_ns() >= end; });
  }
  if (!alone && heap_ != nullptr) heap_->retire_blocks();
}

void Engine::refuse(std::string_view text, uint32_t site, double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  if (helper() == nullptr || helper()->idle()) return execute_refusal(text, site, timeout_s, true);
  run_queued([=, this](bool helped) { execute_refusal(text, site, timeout_s, helped); });
}

HelperThread& Engine::started_helper() {
  std::lock_guard lock(mutex_);
  if (helper() != nullptr) return *helper();
  try {
    own_helper_ = std::make_unique<HelperThread>(sharing_, &block_->queued);
  } catch (const std::exception& error) {  // the call is not made, so the peers would wait for us
    faults_.set(Cause::kAbort, rank_, iteration(), error.what());
    throw;
  }
  helper_.store(own_helper_.get(), std::memory_order_release);
  return *own_helper_;
}

// Runs work behind the queue. It may refer to the caller's memory: it is over when this returns.
void Engine::run_queued(HelperThread::Work work) {
  const Ticket ticket = helper()->submit(std::move(work), HelperThread::Start::kSoon);
  try {
    wait(ticket);
  } catch (...) {
    helper()->wait(ticket, [](Pulse) { return false; });
    forget(ticket);
    throw;
  }
}

bool Engine::done(Ticket ticket) const { return helper() != nullptr && helper()->done(ticket); }

void Engine::wait(Ticket ticket, double timeout_s) {
  COLL_CHECK(fork_guard_.at_home(), "ForkedError", kNotHere);
  COLL_CHECK(helper() != nullptr, "CommClosed", "no call was submitted");
  Deadline deadline(timeout_s < 0 ? INFINITY : timeout_s);
  if (timeout_s < 0) helper()->help(ticket);  // which may take as long as the calls may
  const bool finished = helper()->wait(ticket, [&](Pulse pulse) {
    check_signals(pulse);
    return deadline.passes();
  });
  COLL_CHECK(finished, "CollTimeout", "the call has not finished within ", timeout_s,
             " s; it still runs and can be waited for again");
  if (const std::exception_ptr failure = error(ticket)) std::rethrow_exception(failure);
}

std::exception_ptr Engine::error(Ticket ticket) const {
  if (!fork_guard_.at_home()) return std::make_exception_ptr(Error("ForkedError", kNotHere));
  return helper() != nullptr ? helper()->error(ticket) : nullptr;
}

void Engine::forget(Ticket ticket) {
  if (fork_guard_.at_home() && helper() != nullptr) helper()->forget(ticket);
}

void Engine::check_signals(Pulse pulse) {
  if (pulse != Pulse::kSlice || options_.check_signals == nullptr) return;
  if (!options_.check_signals(options_.context)) return;
  faults_.set(Cause::kInterrupt, rank_, iteration());
  throw_error("Interrupted", "rank ", rank_, " was interrupted; its communicator is aborted");
}

bool Engine::check(int32_t peer, Pulse pulse) {
  check_usable();
  faults_.check_peers(iteration());
  check_signals(pulse);
  if (peer >= 0) return faults_.closed(static_cast<uint32_t>(peer));
  return peer == kAnyRank && faults_.others_closed();
}

void Engine::abort(std::string_view text) {
  check_usable();
  faults_.set(Cause::kAbort, rank_, iteration(), text);
}

void Engine::leave(std::string_view text) {
  if (!fork_guard_.at_home() || closed() || (state_.fetch_or(kLeft) & kLeft) != 0) return;
  store_text(block_->leave_text, kTextBytes, text);
  block_->phase.store(static_cast<uint32_t>(Phase::kLeft), std::memory_order_release);
  faults_.set(Cause::kLeft, rank_, iteration(), text);
}

void Engine::drain() {
  if (helper() == nullptr) return;
  helper()->help(helper()->last());
  helper()->wait(helper()->last(), [this](Pulse pulse) {
    check_signals(pulse);
    return false;
  });
}

std::unique_ptr<Use> Engine::hold() {
  check_usable();
  return std::make_unique<Use>(user_, rank_);
}

void Engine::check_unused() const {
  if (fork_guard_.at_home()) Use::check_unused(user_, rank_);
}

void Engine::close() {
  if (!fork_guard_.at_home()) {
    if (helper() != nullptr) helper()->abandon();
    state_.fetch_or(kClosed);
    return;
  }
  const Use use(user_, rank_);
  if (closed()) return;
  drain();
  state_.fetch_or(kClosed);
  if ((state_.load() & kLeft) == 0) {
    block_->phase.store(static_cast<uint32_t>(Phase::kClosed), std::memory_order_seq_cst);
  }
  control_->wake_everybody();
  if (helper() != nullptr) helper()->stop();
  alive_.reset();
}

}  // namespace pycoll
