#include "engine/liveness.h"

#include <linux/futex.h>
#include <signal.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

// The keeper has nothing to check while it has nothing to do, so its slices of sleep may be long.
constexpr WaitPolicy kIdle = {
    .spins = 0, .yield_us = 0, .first_slice_us = 1000000, .last_slice_us = 1000000000};
constexpr auto kNeverGiveUp = [](Pulse) { return false; };

thread_local const Keeper* waiting_for = nullptr;  // what this thread waits for

// Blocks all signals in this thread for as long as it lives, and in the threads that it starts.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void life_init(pthread_mutex_t* life) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int rc = pthread_mutex_init(life, &attributes);
  pthread_mutexattr_destroy(&attributes);
  COLL_CHECK(rc == 0, "TransportError", "no robust mutex: ", std::strerror(rc));
}

bool life_lost(pthread_mutex_t* life) {
#if defined(__GLIBC__)
  // The kernel sets this bit in the lock word as the first act of the owner's death.
  return (__atomic_load_n(&life->__data.__lock, __ATOMIC_ACQUIRE) & FUTEX_OWNER_DIED) != 0;
#else
  const int rc = pthread_mutex_trylock(life);
  if (rc == 0 || rc == EOWNERDEAD) pthread_mutex_unlock(life);  // dead: not recoverable from now on
  return rc == EOWNERDEAD || rc == ENOTRECOVERABLE;
#endif
}

Keeper::Keeper(pthread_mutex_t* life, uint32_t ranks) : policy_(background_policy(ranks)) {
  try {
    const SignalsBlocked blocked;
    thread_ = std::make_unique<std::thread>([this, life] { serve(life); });
  } catch (const std::system_error& error) {
    throw_error("TransportError", "cannot start the keeper thread: ", error.what(),
                "; raise the limit on processes (ulimit -u, pids.max) or on memory");
  }
  wait_until(
      kIdle, {&done_word_, &done_sleepers_},
      [this] { return done_word_.load(std::memory_order_acquire) != 0; }, kNeverGiveUp);
}

void Keeper::notify(std::atomic<uint32_t>& word, const Bell& bell) {
  word.fetch_add(1, std::memory_order_seq_cst);
  ring(bell);
}

// Marks the thread as one that waits, and maybe helps, for as long as it lives.
class Keeper::Waiting {
 public:
  explicit Waiting(const Keeper& keeper) : before_(waiting_for) {
    keeper.refuse_nested();
    waiting_for = &keeper;
  }
  ~Waiting() { waiting_for = before_; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const Keeper* before_;
};

void Keeper::refuse_nested() const {
  COLL_CHECK(waiting_for != this, "ConcurrentUseError",
             "a signal handler used a communicator while its thread was inside a call of it");
}

Keeper::Ticket Keeper::submit(Work work) {
  refuse_nested();
  Ticket ticket;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ticket = submitted_.fetch_add(1, std::memory_order_release) + 1;
  }
  notify(work_word_, {&work_word_, &work_sleepers_});
  return ticket;
}

void Keeper::serve(pthread_mutex_t* life) {
  if (life != nullptr) pthread_mutex_lock(life);
  notify(done_word_, {&done_word_, &done_sleepers_});
  const auto over = [this] { return stopping_.load(std::memory_order_acquire) && idle(); };
  while (!over()) {
    wait_until(
        kIdle, {&work_word_, &work_sleepers_},
        [&] {
          const uint64_t started = started_.load(std::memory_order_acquire);
          return (done(started) && last() > started) || over();
        },
        kNeverGiveUp);
    run_next(false);
  }
  if (life != nullptr) pthread_mutex_unlock(life);
}

bool Keeper::run_next(bool helped) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty() || !done(started_.load(std::memory_order_relaxed))) return false;
    work = std::move(queue_.front());
    queue_.pop_front();
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
  work = nullptr;  // whoever waits may free what the work held on to
  bool more;
  {
    std::lock_guard lock(mutex_);
    const uint64_t finished = started_.load(std::memory_order_relaxed);
    if (error) errors_[finished] = std::exchange(error, nullptr);
    finished_.store(finished, std::memory_order_release);
    more = !queue_.empty() || stopping_.load(std::memory_order_relaxed);
  }
  notify(done_word_, {&done_word_, &done_sleepers_});
  if (helped && more) notify(work_word_, {&work_word_, &work_sleepers_});
  if (interrupt) std::rethrow_exception(interrupt);
  return true;
}

void Keeper::help(Ticket ticket) {
  const Waiting waiting(*this);
  while (!done(ticket) && run_next(true)) {
  }
}

bool Keeper::wait(Ticket ticket, const std::function<bool(Pulse)>& give_up) {
  if (done(ticket)) return true;
  const Waiting waiting(*this);
  return wait_until(policy_, {&done_word_, &done_sleepers_}, [&] { return done(ticket); }, give_up);
}

std::exception_ptr Keeper::error(Ticket ticket) {
  std::lock_guard lock(mutex_);
  const auto it = errors_.find(ticket);
  return it == errors_.end() ? nullptr : it->second;
}

void Keeper::forget(Ticket ticket) {
  std::lock_guard lock(mutex_);
  errors_.erase(ticket);
}

void Keeper::stop() {
  if (thread_ == nullptr) return;
  {
    std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_release);
  }
  notify(work_word_, {&work_word_, &work_sleepers_});
  thread_->join();
  thread_.reset();
}

void Keeper::abandon() { static_cast<void>(thread_.release()); }

}  // namespace pycoll
