// Calls of a communicator over messages, and the queue. message_batch.cpp runs the calls,
// message_close.cpp ends the communicator, message_failure.cpp has the failures.
#include "transports/messages/message_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace pycoll {

namespace {

constexpr char kNotHere[] = "this call belongs to the parent process";
constexpr uint64_t kPauseNs = 10'000'000;
constexpr uint32_t kRoundsAfterPause = 3;
constexpr uint32_t kLooksAfterPause = 20;

// Yields longer than ranks that share memory do, and sleeps in short slices: over MPI nobody wakes
// this rank. A test may cost 25 us (MPICH over TCP), so few are made before the first yield.
WaitPolicy policy_for(Sharing sharing) {
  return {.spins = 5,
          .yield_us = sharing.crowded() ? 2'000u : 20'000u,
          .first_slice_us = 50,
          .last_slice_us = 1000};
}

}  // namespace

MessageEngine::MessageEngine(std::shared_ptr<Transport> api, std::vector<int> members,
                             uint32_t rank, uint32_t context, const MessageOptions& options)
    : link_(api, members, rank, context),
      api_(std::move(api)),
      options_(options),
      policy_(policy_for(sharing_)),
      rank_(rank),
      world_size_(static_cast<uint32_t>(members.size())),
      departed_(members.size(), false),
      records_(members.size()) {
  if (options.cookie != 0) board_ = Board::make(options.cookie, world_size_, rank, 0);
  site("");
}

void MessageEngine::share_cores(Sharing sharing) {
  sharing_ = sharing;
  policy_ = policy_for(sharing);
}

MessageEngine::~MessageEngine() {
  if (!fork_guard_.at_home()) {
    if (helper() != nullptr) helper()->abandon();
    return;
  }
  try {
    close();
  } catch (const std::exception&) {  // what is left to release does not depend on it
  }
  if (helper() != nullptr) helper()->stop();
}

void MessageEngine::check_usable() {
  COLL_CHECK(fork_guard_.at_home(), "ForkedError", "rank ", rank_,
             "'s communicator was made before this process was forked and belongs to the parent; "
             "make a new one in the child, or start it by spawn");
  COLL_CHECK(!closed_ && !left_, "CommClosed", "rank ", rank_, " has ", closed_ ? "closed" : "left",
             " this communicator");
  check_mpi();
}

void MessageEngine::check_mpi() const {
  COLL_CHECK(!api_->ended(), "TransportError", "rank ", rank_,
             " called MPI.Finalize() before this ",
             "communicator was closed: what it does needs MPI");
}

std::shared_ptr<const BoundCall> MessageEngine::bind(Binding binding, MessageLimits limits,
                                                     bool agree, std::vector<uint32_t> team) const {
  limits.world_size = world_size_;
  limits.rank = rank_;
  limits.eager_bytes = std::min(limits.eager_bytes, kEagerBytes);
  const auto call = bind_messages(std::move(binding), limits, agree, std::move(team));
  if (call->tiny) call->packets = plan_packets(*call, world_size_);
  return call;
}

uint32_t MessageEngine::site(std::string_view text) {
  const std::lock_guard lock(site_mutex_);
  const auto known = sites_.find(std::string(text));
  if (known != sites_.end()) return known->second;
  if (site_texts_.size() == kSites) return kSites - 1;
  const auto id = static_cast<uint32_t>(site_texts_.size());
  site_texts_.emplace_back(id == kSites - 1 ? "(another call site)" : text);
  if (board_ != nullptr) board_->name_site(id, site_texts_.back());
  sites_.emplace(text, id);
  return id;
}

std::string MessageEngine::site_text(uint32_t site) const {
  const std::lock_guard lock(site_mutex_);
  return site_texts_[site];
}

void MessageEngine::begin(const Job& job, bool signals) {
  // A failure may have come while this rank was busy elsewhere: MPI may need more than one probe to
  // see it. A rank that was not has looked a moment ago, and looks again as soon as it waits.
  if (coarse_ns() > waiting_since_ns_ + kPauseNs) {
    const uint32_t ranks = std::max(1u, std::min(world_size_ - 1, kLooksAfterPause));
    const uint32_t rounds = std::max(kRoundsAfterPause, kLooksAfterPause / ranks);
    for (uint32_t i = 0; i < rounds && !failed_; ++i) receive_notices(ranks);
  }
  if (failed_) raise_failure();
  if (seq_ <= stale_until_seq_) link_.drop_before(seq_);
  job_ = job;
  if (job_.timeout_s < 0) job_.timeout_s = options_.timeout_s;
  deadline_.clear();
  waiting_ = {};
  questioned_.clear();
  signals_ = signals;
  in_call_ = true;
  early_ = may_leave(*job.call);
  last_descriptor_ = job.call->descriptor;
  last_count_ = job.call->count;
  last_check_ = unproven_.mixed(job.call->check);
  last_site_ = job.site;
  if (!unproven_.empty()) look_back();
  if (must_conclude()) conclude();
}

void MessageEngine::end() {
  in_call_ = false;
  waiting_since_ns_ = coarse_ns();
  if (board_ != nullptr) board_->waits(-1, 0, 0);
  ++seq_;
  refused_.erase(refused_.begin(), refused_.lower_bound(seq_));
  std::erase_if(questions_, [&](const Notice& ask) {
    return ask.seq < seq_ && unproven_.find(ask.seq) == nullptr;
  });
}

template <typename F>
MessageEngine::Ticket MessageEngine::submit_to_helper(F&& work, HelperThread::Start start) {
  try {
    return helper()->submit(std::forward<F>(work), start);
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
}

void MessageEngine::run(const BoundCall& call, const void* in, void* out, uint32_t site,
                        double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  const Job job{&call, in, out, site, timeout_s};
  if (helper() != nullptr && !helper()->idle()) {
    const HelperThread::Ticket ticket = submit_to_helper(
        [this, job](bool helped) { execute(job, helped); }, HelperThread::Start::kSoon);
    try {
      wait(ticket);
    } catch (...) {  // the call, and its arrays, are the caller's again only when it is over
      helper()->wait(ticket, [](Pulse) { return false; });
      forget(ticket);
      throw;
    }
    return;
  }
  settle();
  execute(job, true);
}

MessageEngine::Ticket MessageEngine::submit(std::shared_ptr<const BoundCall> call, const void* in,
                                            void* out, uint32_t site, double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  const Job job{call.get(), in, out, site, timeout_s};
  if (api_->any_thread) {
    if (helper() == nullptr) make_helper();
    const auto start = call->tiny ? HelperThread::Start::kSoon : HelperThread::Start::kNow;
    return submit_to_helper(
        [this, job, call = std::move(call)](bool helped) { execute(job, helped); }, start);
  }
  try {
    const std::lock_guard lock(mutex_);
    queue_.push_back({job, std::move(call)});
    show_queue();
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
  const Ticket ticket = ++submitted_;
  step_queue();
  return ticket;
}

// Without a thread the call is not made: every rank that waits for it must fail.
void MessageEngine::make_helper() {
  try {
    own_helper_ = std::make_unique<HelperThread>(
        sharing_, board_ == nullptr ? nullptr : &board_->block().queued);
    helper_.store(own_helper_.get(), std::memory_order_release);
  } catch (const std::bad_alloc&) {
    out_of_memory();
  } catch (const Error& error) {
    raise_on_all(error.kind(), "rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  }
}

// Shows how many calls have not begun.
void MessageEngine::show_queue() {
  const size_t begun = current_ != nullptr;
  if (board_ != nullptr) board_->block().queued = uint32_t(queue_.size() - begun);
}

// Makes progress on the oldest queued call. Several threads may wait for calls: one at a time.
void MessageEngine::step_queue() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return;
  const Job& job = queue_.front().job;
  bool over = false;
  try {
    check_mpi();
    attempt([&] {
      if (current_ == nullptr) {
        begin(job, true);
        show(job.call->descriptor, job.call->count, job.site);
        current_ = make_task(rooms_[0], job, seq_);
        show_queue();
      }
      over = current_->advance();
      if (over) {
        check_late_notices(*job.call);
        pass(*job.call);
      }
    });
  } catch (...) {
    return end_queued(std::current_exception());
  }
  if (!over) return;
  shown(true);
  end();
  end_queued(nullptr);
}

// The oldest call of the queue has ended, with this error or with none.
void MessageEngine::end_queued(std::exception_ptr error) {
  if (error != nullptr) {
    shown(false);
    const std::lock_guard lock(errors_mutex_);
    errors_[finished_ + 1] = std::move(error);
  }
  current_.reset();
  queue_.pop_front();
  show_queue();
  ++finished_;
}

// Checks whether the call that is under way can still end.
void MessageEngine::check_queue(Pulse pulse) {
  const std::lock_guard lock(mutex_);
  if (current_ == nullptr) return;
  const Ticket ticket = finished_ + 1;
  try {
    attempt([&] { check_call(*current_, pulse); });
  } catch (const Error& error) {
    // The interrupted thread raises here; for any other that waits for the call it is an abort. The
    // signal handler may have called done(), and so have ended the call.
    const bool interrupted = std::strcmp(error.kind(), "Interrupted") == 0;
    if (finished_ < ticket) {
      end_queued(interrupted ? std::make_exception_ptr(Error("Revoked", error.what()))
                             : std::current_exception());
    }
    if (interrupted) throw;
  }
}

// Runs calls up to this ticket; false if it takes longer than timeout_s (< 0: no limit).
bool MessageEngine::await(Ticket until, double timeout_s) {
  Deadline limit(timeout_s < 0 ? INFINITY : timeout_s);
  if (helper() != nullptr) {
    if (timeout_s < 0) helper()->help(until);
    return helper()->wait(until, [&](Pulse pulse) {
      check_signals(pulse);
      return limit.passes();
    });
  }
  return wait_until(
      policy_, bell(),
      [&] {
        if (finished_ < until) step_queue();
        return finished_ >= until;
      },
      [&](Pulse pulse) {
        check_queue(pulse);
        return limit.passes();
      });
}

bool MessageEngine::done(Ticket ticket) {
  if (helper() != nullptr) return helper()->done(ticket);
  // Messages belong to the parent of a process made by fork.
  if (finished_ < ticket && fork_guard_.at_home() && user_.load() == 0) step_queue();
  return finished_ >= ticket;
}

void MessageEngine::wait(Ticket ticket, double timeout_s) {
  COLL_CHECK(fork_guard_.at_home(), "ForkedError", kNotHere);
  COLL_CHECK(await(ticket, timeout_s), "CollTimeout", "the call has not finished within ",
             timeout_s, " s; it still runs and can be waited for again");
  if (const std::exception_ptr failure = error(ticket)) std::rethrow_exception(failure);
}

std::exception_ptr MessageEngine::error(Ticket ticket) const {
  if (!fork_guard_.at_home()) return std::make_exception_ptr(Error("ForkedError", kNotHere));
  if (helper() != nullptr) return helper()->error(ticket);
  const std::lock_guard lock(errors_mutex_);
  const auto found = errors_.find(ticket);
  return found == errors_.end() ? nullptr : found->second;
}

void MessageEngine::forget(Ticket ticket) {
  if (!fork_guard_.at_home()) return;
  if (helper() != nullptr) return helper()->forget(ticket);
  const std::lock_guard lock(errors_mutex_);
  errors_.erase(ticket);
}

void MessageEngine::settle() {
  if (prompt()) return;
  await(helper() != nullptr ? helper()->last() : submitted_.load(), kDefaultTimeout);
}

void MessageEngine::skip() {
  check_usable();
  settle();
  const std::lock_guard lock(mutex_);
  in_call_ = false;
  ++seq_;
}

void MessageEngine::await_refusal() {
  check_usable();
  settle();
  const std::lock_guard lock(mutex_);
  const uint64_t until = now_ns() + kClosingNs;
  wait_until(
      policy_, bell(),
      [&] {
        receive_notices(kPeersPerLook);
        return last_refusal_ + 1 >= seq_ || failed_ || someone_fails_;
      },
      [&](Pulse) { return now_ns() >= until; });
}

}  // namespace pycoll
