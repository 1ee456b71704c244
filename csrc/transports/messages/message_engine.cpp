// Calls of a communicator over MPI, the queue, leaving and closing. message_batch.cpp runs the
// calls, message_fault.cpp has the failures.
#include "transports/messages/message_engine.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace pycoll {

namespace {

constexpr char kNotHere[] = "this call belongs to the parent process";
constexpr uint64_t kFlushNs = 1'000'000'000;
constexpr uint64_t kFarewellNs = 100'000'000;
constexpr uint64_t kAwayNs = 10'000'000;
constexpr uint32_t kRoundsAfterAbsence = 3;
constexpr uint32_t kLooksAfterAbsence = 20;

// Polls longer than ranks that share memory do: nobody wakes us. Sleeps are short for that reason.
// A poll may cost 25 us (MPICH over TCP), so few are made before the first yield.
WaitPolicy policy_for(uint32_t ranks) {
  return {.spins = 5,
          .yield_us = crowded(ranks) ? 2'000u : 20'000u,
          .first_slice_us = 50,
          .last_slice_us = 1000};
}

}  // namespace

MpiEngine::MpiEngine(std::shared_ptr<MpiApi> api, MpiHandle comm, std::vector<int> members,
                     uint32_t rank, uint32_t context, const MpiOptions& options)
    : link_(api, comm, members, rank, context),
      api_(std::move(api)),
      options_(options),
      policy_(policy_for(options.crowd)),
      rank_(rank),
      world_size_(static_cast<uint32_t>(members.size())),
      gone_(members.size(), false),
      records_(members.size()) {
  site("");
}

MpiEngine::~MpiEngine() {
  if (!fork_guard_.at_home()) {
    if (helper_ != nullptr) helper_->abandon();
    return;
  }
  try {
    close();
  } catch (const Error&) {  // what is left to release does not depend on it
  }
  if (helper_ != nullptr) helper_->stop();
}

void MpiEngine::check_usable() {
  COLL_CHECK(fork_guard_.at_home(), "ForkedError", "rank ", rank_,
             "'s communicator was made before this process was forked and belongs to the parent; "
             "make a new one in the child, or start it by spawn");
  COLL_CHECK(!closed_ && !left_, "CommClosed", "rank ", rank_, " has ", closed_ ? "closed" : "left",
             " this communicator");
  check_mpi();
}

void MpiEngine::check_mpi() const {
  COLL_CHECK(!api_->ended(), "TransportError", "rank ", rank_,
             " called MPI.Finalize() before this ",
             "communicator was closed: what it does needs MPI");
}

std::shared_ptr<const BoundCall> MpiEngine::bind(Binding binding, uint64_t segment_bytes,
                                                 uint64_t packet_bytes, bool agree,
                                                 std::vector<uint32_t> team) const {
  packet_bytes = std::min(packet_bytes, kPacketBytes);
  return bind_messages(std::move(binding), {world_size_, rank_, segment_bytes, packet_bytes}, agree,
                       std::move(team));
}

uint32_t MpiEngine::site(std::string_view text) {
  const std::lock_guard lock(site_mutex_);
  const auto known = sites_.find(std::string(text));
  if (known != sites_.end()) return known->second;
  if (site_texts_.size() == kSites) return kSites - 1;
  const auto id = static_cast<uint32_t>(site_texts_.size());
  site_texts_.emplace_back(id == kSites - 1 ? "(another call site)" : text);
  sites_.emplace(text, id);
  return id;
}

void MpiEngine::begin(const Job& job, bool signals) {
  // A failure while we were away: MPI may need to be asked more than once to see what has come. Who
  // was not away has looked a moment ago, and looks again as soon as it waits.
  if (coarse_ns() > waiting_since_ns_ + kAwayNs) {
    const uint32_t ranks = std::max(1u, std::min(world_size_ - 1, kLooksAfterAbsence));
    const uint32_t rounds = std::max(kRoundsAfterAbsence, kLooksAfterAbsence / ranks);
    for (uint32_t i = 0; i < rounds && !failed_; ++i) look_for_notices(ranks);
  }
  if (failed_) raise_failure();
  if (seq_ <= stale_until_) link_.drop_before(seq_);
  job_ = job;
  if (job_.timeout_s < 0) job_.timeout_s = options_.timeout_s;
  deadline_ns_ = 0;
  waiting_ = {};
  asked_.clear();
  signals_ = signals;
  in_call_ = true;
  last_descriptor_ = job.call->descriptor;
  last_count_ = job.call->count;
  last_check_ = job.call->check;
  last_site_ = job.site;
  if (must_conclude()) conclude();
}

void MpiEngine::end() {
  in_call_ = false;
  waiting_since_ns_ = coarse_ns();
  ++seq_;
  refused_.erase(refused_.begin(), refused_.lower_bound(seq_));
  std::erase_if(asks_, [&](const Notice& ask) { return ask.seq < seq_; });
}

template <typename F>
MpiEngine::Ticket MpiEngine::give_to_helper(F&& work) {
  try {
    return helper_->submit(std::forward<F>(work));
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
}

void MpiEngine::run(const BoundCall& call, const void* in, void* out, uint32_t site,
                    double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  const Job job{&call, in, out, site, timeout_s};
  if (helper_ != nullptr && !helper_->idle()) {
    const HelperThread::Ticket ticket =
        give_to_helper([this, job](bool helped) { execute(job, helped); });
    try {
      await_helper(ticket, kDefaultTimeout);
    } catch (...) {  // the call, and its arrays, are the caller's again only when it is over
      helper_->wait(ticket, [](Pulse) { return false; });
      forget(ticket);
      throw;
    }
    return;
  }
  pump(submitted_, kDefaultTimeout);
  execute(job, true);
}

MpiEngine::Ticket MpiEngine::submit(std::shared_ptr<const BoundCall> call, const void* in,
                                    void* out, uint32_t site, double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  const Job job{call.get(), in, out, site, timeout_s};
  if (api_->facts().multiple) {
    if (helper_ == nullptr) make_helper();
    return give_to_helper(
        [this, job, call = std::move(call)](bool helped) { execute(job, helped); });
  }
  try {
    const std::lock_guard lock(mutex_);
    queue_.push_back({job, std::move(call)});
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
  const Ticket ticket = ++submitted_;
  step_queue();
  return ticket;
}

// Where there can be no thread, the call is made nowhere: whoever waits for it has to hear that.
void MpiEngine::make_helper() {
  try {
    helper_ = std::make_unique<HelperThread>(nullptr, options_.crowd);
  } catch (const std::bad_alloc&) {
    out_of_memory();
  } catch (const Error& error) {
    spread(error.kind(), "rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  }
}

// Does what can be done for the oldest queued call. Several threads may wait for calls: while one
// of them is here, the others are not, nor in messages of users.
void MpiEngine::step_queue() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return;
  const Job& job = queue_.front().job;
  bool over = false;
  try {
    check_mpi();
    attempt([&] {
      if (current_ == nullptr) {
        begin(job, true);
        current_ = make_task(job, seq_, 0);
      }
      over = current_->advance();
      if (over) look_back(*job.call);
    });
  } catch (...) {
    return leave_queue(std::current_exception());
  }
  if (!over) return;
  end();
  leave_queue(nullptr);
}

// The oldest call of the queue has ended, with this error or with none.
void MpiEngine::leave_queue(std::exception_ptr error) {
  if (error != nullptr) {
    const std::lock_guard lock(errors_mutex_);
    errors_[finished_ + 1] = std::move(error);
  }
  current_.reset();
  queue_.pop_front();
  ++finished_;
}

// Looks whether the call that is under way can still end.
void MpiEngine::check_queue(Pulse pulse) {
  const std::lock_guard lock(mutex_);
  if (current_ == nullptr) return;
  const Ticket ticket = finished_ + 1;
  try {
    attempt([&] { check_call(*current_, pulse); });
  } catch (const Error& error) {
    // Who is interrupted hears it here; to whoever waits for that call it is an abort. The signal
    // handler may have asked whether the call is done, and so have brought it to its end.
    const bool interrupted = std::strcmp(error.kind(), "Interrupted") == 0;
    if (finished_ < ticket) {
      leave_queue(interrupted ? std::make_exception_ptr(Error("Revoked", error.what()))
                              : std::current_exception());
    }
    if (interrupted) throw;
  }
}

// Runs queued calls up to this ticket; false if it takes longer than timeout_s.
bool MpiEngine::pump(Ticket until, double timeout_s) {
  const uint64_t limit = timeout_s < 0 ? UINT64_MAX : deadline_after(timeout_s);
  return wait_until(
      policy_, Bell{},
      [&] {
        if (finished_ < until) step_queue();
        return finished_ >= until;
      },
      [&](Pulse pulse) {
        check_queue(pulse);
        return now_ns() >= limit;
      });
}

bool MpiEngine::done(Ticket ticket) {
  if (helper_ != nullptr) return helper_->done(ticket);
  // What has come for a call is its own process's, not that of a child made by fork.
  if (finished_ < ticket && fork_guard_.at_home() && user_.load() == 0) step_queue();
  return finished_ >= ticket;
}

void MpiEngine::await_helper(Ticket ticket, double timeout_s) {
  const uint64_t limit = timeout_s < 0 ? UINT64_MAX : deadline_after(timeout_s);
  if (timeout_s < 0) helper_->help(ticket);
  const bool finished = helper_->wait(ticket, [&](Pulse pulse) {
    check_signals(pulse);
    return now_ns() >= limit;
  });
  COLL_CHECK(finished, "CollTimeout", "the call has not finished within ", timeout_s,
             " s; it still runs and can be waited for again");
  if (const std::exception_ptr failure = error(ticket)) std::rethrow_exception(failure);
}

void MpiEngine::wait(Ticket ticket, double timeout_s) {
  COLL_CHECK(fork_guard_.at_home(), "ForkedError", kNotHere);
  if (helper_ != nullptr) return await_helper(ticket, timeout_s);
  COLL_CHECK(pump(ticket, timeout_s), "CollTimeout", "the call has not finished within ", timeout_s,
             " s; it still runs and can be waited for again");
  if (const std::exception_ptr failure = error(ticket)) std::rethrow_exception(failure);
}

std::exception_ptr MpiEngine::error(Ticket ticket) const {
  if (!fork_guard_.at_home()) return std::make_exception_ptr(Error("ForkedError", kNotHere));
  if (helper_ != nullptr) return helper_->error(ticket);
  const std::lock_guard lock(errors_mutex_);
  const auto found = errors_.find(ticket);
  return found == errors_.end() ? nullptr : found->second;
}

void MpiEngine::forget(Ticket ticket) {
  if (!fork_guard_.at_home()) return;
  if (helper_ != nullptr) return helper_->forget(ticket);
  const std::lock_guard lock(errors_mutex_);
  errors_.erase(ticket);
}

void MpiEngine::settle() {
  if (helper_ != nullptr) {
    helper_->help(helper_->last());
    helper_->wait(helper_->last(), [this](Pulse pulse) {
      check_signals(pulse);
      return false;
    });
  } else {
    pump(submitted_, kDefaultTimeout);
  }
}

void MpiEngine::skip() {
  check_usable();
  settle();
  const std::lock_guard lock(mutex_);
  in_call_ = false;
  ++seq_;
}

void MpiEngine::listen() {
  check_usable();
  settle();
  const std::lock_guard lock(mutex_);
  const uint64_t until = now_ns() + kFarewellNs;
  wait_until(
      policy_, Bell{},
      [&] {
        look_for_notices(kLooks);
        return last_refusal_ + 1 >= seq_ || failed_ || someone_fails_;
      },
      [&](Pulse) { return now_ns() >= until; });
}

void MpiEngine::leave(std::string_view text) {
  if (!fork_guard_.at_home() || closed_ || left_ || api_->ended()) return;
  const std::lock_guard lock(mutex_);
  left_ = true;
  Notice notice = own_record(Notice::kLeft);
  store_text(notice.text, sizeof(notice.text), text);
  tell_all(notice);
  flush(kFlushNs, true);
  if (failed_) return;
  records_[rank_] = notice;  // calls in the queue end, too
  report_ = {Cause::kLeft, rank_, rank_, seq_, notice.text, records_};
  failure_kind_ = "PeerLeft";
  failure_text_ = notice.text;
  failed_ = true;
}

void MpiEngine::close() {
  if (!fork_guard_.at_home()) {
    if (helper_ != nullptr) helper_->abandon();
    closed_ = true;
    return;
  }
  const Use use(user_, rank_);
  if (closed_) return;
  const bool speaks = !api_->ended();
  if (speaks) settle();
  closed_ = true;
  const std::lock_guard lock(mutex_);
  if (!left_ && !failed_ && speaks) {
    tell_all(own_record(Notice::kClosed));
    flush(kFlushNs, true);
    const uint64_t until = now_ns() + kFarewellNs;  // MPI complains of what nobody has received
    try {
      wait_until(
          policy_, Bell{},
          [&] {
            look_for_notices(kLooks);
            if (stale_until_ > 0) link_.drop_before(seq_);
            return others_gone();
          },
          [&](Pulse) { return now_ns() >= until; });
    } catch (const Error&) {  // somebody has died, which no longer matters
    }
  }
  if (helper_ != nullptr) helper_->stop();
}

bool MpiEngine::others_gone() const {
  return std::count(gone_.begin(), gone_.end(), true) + 1 >= int64_t{world_size_};
}

// Gives notices the time to leave, and to messages of users if this rank goes. Packets of calls
// have left when the calls ended, or nobody wants them.
void MpiEngine::flush(uint64_t patience_ns, bool mail) {
  const uint64_t until = now_ns() + patience_ns;
  wait_until(
      policy_, Bell{}, [&] { return link_.told(mail); }, [&](Pulse) { return now_ns() >= until; });
}

}  // namespace pycoll
