#include "engine/helper_thread.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/signals_blocked.h"

namespace pycoll {
namespace {

// The helper has nothing to check while it has nothing to do, so its slices of sleep may be long.
constexpr WaitPolicy kIdle = {
    .spins = 0, .yield_us = 0, .first_slice_us = 1000000, .last_slice_us = 1000000000};
constexpr uint64_t kAwakeNs = 20'000'000;  // behind the last work, in naps
constexpr auto kNeverGiveUp = [](Pulse) { return false; };

thread_local const HelperThread* waiting_for = nullptr;  // what this thread waits for

}  // namespace

HelperThread::HelperThread(Sharing sharing, std::atomic<uint32_t>* queued)
    : policy_(background_policy(sharing)), queued_(queued) {
  try {
    const SignalsBlocked blocked;
    thread_ = std::make_unique<std::thread>([this] { serve(); });
  } catch (const std::system_error& error) {
    throw_error("TransportError", "cannot start the helper thread: ", error.what(),
                "; raise the limit on processes (ulimit -u, pids.max) or on memory");
  }
}

void HelperThread::notify(std::atomic<uint32_t>& word, const Bell& bell) {
  word.fetch_add(1, std::memory_order_seq_cst);
  ring(bell);
}

void HelperThread::show_queue() {
  if (queued_ != nullptr) queued_->store(uint32_t(queue_.size()), std::memory_order_relaxed);
}

// Marks the thread as one that waits, and maybe helps, for as long as it lives.
class HelperThread::Waiting {
 public:
  explicit Waiting(const HelperThread& helper) : before_(waiting_for) {
    helper.refuse_nested();
    waiting_for = &helper;
  }
  ~Waiting() { waiting_for = before_; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const HelperThread* before_;
};

void HelperThread::refuse_nested() const {
  COLL_CHECK(waiting_for != this, "ConcurrentUseError",
             "a signal handler used a communicator while its thread was inside a call of it");
}

HelperThread::Ticket HelperThread::submit(Work work, Start start) {
  refuse_nested();
  Ticket ticket;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    show_queue();
    ticket = submitted_.fetch_add(1, std::memory_order_release) + 1;
    if (start == Start::kNow) urgent_.store(ticket, std::memory_order_seq_cst);
  }
  tell_of_work(start);
  return ticket;
}

void HelperThread::tell_of_work(Start start) {
  notify(work_word_, {&work_word_, &work_sleepers_});
  if (start == Start::kNow) notify(urgent_word_, {&urgent_word_, &nappers_});
}

bool HelperThread::over() const { return stopping_.load(std::memory_order_acquire) && idle(); }

void HelperThread::serve() {
  while (!over()) {
    await_work();
    run_next(false);
  }
}

bool HelperThread::waits(Ticket until) const {
  const uint64_t started = started_.load(std::memory_order_acquire);
  return done(started) && until > started;
}

// Sleeps until there is work that nobody runs. To be woken costs whoever queues work more than a
// small call, so for a while behind the last work it wakes by itself. It then takes what was queued
// before the nap: whoever has just queued some may be about to wait for it.
void HelperThread::await_work() {
  if (waits(last())) return;
  const auto due = [this] { return over() || waits(urgent_.load(std::memory_order_seq_cst)); };
  uint64_t known = 0, until = 0;
  for (uint32_t nap_us = kNapUs;; nap_us = std::min(2 * nap_us, kLongNapUs)) {
    const uint64_t submitted = last(), now = now_ns();
    if (submitted != known) until = now + kAwakeNs;
    if (now >= until) break;
    known = submitted;
    const uint32_t seen = load_bell({&urgent_word_});
    nappers_.store(1, std::memory_order_seq_cst);
    if (!due()) sleep_on({&urgent_word_}, seen, nap_us);
    nappers_.store(0, std::memory_order_relaxed);
    if (due() || waits(known)) return;
  }
  wait_until(
      kIdle, {&work_word_, &work_sleepers_}, [this] { return waits(last()) || over(); },
      kNeverGiveUp);
}

bool HelperThread::run_next(bool helped) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty() || !done(started_.load(std::memory_order_relaxed))) return false;
    work = std::move(queue_.front());
    queue_.pop_front();
    show_queue();
    started_.fetch_add(1, std::memory_order_relaxed);
  }
  std::exception_ptr error, interrupt;
  try {
    work(helped);
  } catch (const Error& caught) {
    error = std::current_exception();
    if (helped && std::strcmp(caught.kind(), "Interrupted") == 0) {
      interrupt = std::exchange(error, std::make_exception_ptr(Error("Revoked", caught.what())));
    }
  } catch (...) {
    error = std::current_exception();
  }
  work = nullptr;  // a thread that waits may free what the work refers to
  bool more;
  {
    std::lock_guard lock(mutex_);
    const uint64_t finished = started_.load(std::memory_order_relaxed);
    if (error) errors_[finished] = std::exchange(error, nullptr);
    finished_.store(finished, std::memory_order_release);
    more = !queue_.empty() || stopping_.load(std::memory_order_relaxed);
  }
  notify(done_word_, {&done_word_, &done_sleepers_});
  if (helped && more) tell_of_work(waits(urgent_) ? Start::kNow : Start::kSoon);
  if (interrupt) std::rethrow_exception(interrupt);
  return true;
}

void HelperThread::help(Ticket ticket) {
  const Waiting waiting(*this);
  while (!done(ticket) && run_next(true)) {
  }
}

bool HelperThread::wait(Ticket ticket, const std::function<bool(Pulse)>& give_up) {
  if (done(ticket)) return true;
  const Waiting waiting(*this);
  return wait_until(policy_, {&done_word_, &done_sleepers_}, [&] { return done(ticket); }, give_up);
}

std::exception_ptr HelperThread::error(Ticket ticket) {
  std::lock_guard lock(mutex_);
  const auto it = errors_.find(ticket);
  return it == errors_.end() ? nullptr : it->second;
}

void HelperThread::forget(Ticket ticket) {
  std::lock_guard lock(mutex_);
  errors_.erase(ticket);
}

void HelperThread::stop() {
  if (thread_ == nullptr) return;
  {
    std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_release);
  }
  tell_of_work(Start::kNow);
  thread_->join();
  thread_.reset();
}

void HelperThread::abandon() { static_cast<void>(thread_.release()); }

}  // namespace pycoll
