// Being seen to live, and working in the background: the keeper thread of a rank.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "engine/wait.h"

namespace pycoll {

// Makes an unlocked robust process-shared mutex of it.
void life_init(pthread_mutex_t* life);

// Whether the process that held it died. No system call; also true of a process in another PID
// namespace, and long before its memory is torn down.
bool life_lost(pthread_mutex_t* life);

// One thread that holds the life lock of its rank and runs queued work, first in first out, one at
// a time. Signals are blocked in it. Threads that wait help: what has not begun they run
// themselves. In a child made by fork only abandon() may be called.
class Keeper {
 public:
  using Ticket = uint64_t;
  // Is told whether it runs on a thread that waits for it, where signals may be looked for.
  using Work = std::function<void(bool helped)>;

  // Returns once the thread holds `life` (null: ranks that are threads need no lock). `ranks` of
  // this host decide how to wait.
  Keeper(pthread_mutex_t* life, uint32_t ranks);
  ~Keeper() { stop(); }
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  // Queues work; an exception it throws is kept for error(). Tickets count up from 1. This, help()
  // and wait() throw ConcurrentUseError inside of a wait of the same thread: in a signal handler.
  Ticket submit(Work work);

  // Whether everything submitted has finished.
  bool idle() const { return done(last()); }
  bool done(Ticket ticket) const { return finished_.load(std::memory_order_acquire) >= ticket; }

  // Runs what is queued up to the ticket, on this thread, until another thread runs some of it:
  // that spares waking the thread of the keeper, and waiting for it. Throws "Interrupted" if that
  // is how some of it ended; to whoever waits for that it is "Revoked".
  void help(Ticket ticket);

  // Waits until the ticket is done. give_up() is called at the pulses of wait_until; it throws, or
  // returns true to stop waiting: then the result is false. Throws nothing of the work itself.
  bool wait(Ticket ticket, const std::function<bool(Pulse)>& give_up);

  // Of the work submitted last; 0 before any.
  Ticket last() const { return submitted_.load(std::memory_order_relaxed); }

  // The exception that the work of a finished ticket threw, for everybody who asks until somebody
  // says that nobody will; null if none.
  std::exception_ptr error(Ticket ticket);
  void forget(Ticket ticket);

  // Finishes what is queued, releases the life lock and joins. Idempotent.
  void stop();

  // In a child made by fork, where the thread does not exist: forgets it.
  void abandon();

 private:
  class Waiting;
  void serve(pthread_mutex_t* life);
  void refuse_nested() const;
  bool run_next(bool helped);  // false if there is nothing to run, or another thread runs work
  void notify(std::atomic<uint32_t>& word, const Bell& bell);

  const WaitPolicy policy_;
  std::mutex mutex_;  // of queue_, errors_ and all changes of the counts; never held while waiting
  std::deque<Work> queue_;
  std::map<Ticket, std::exception_ptr> errors_;
  std::atomic<uint64_t> submitted_{0}, started_{0}, finished_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> work_word_{0}, work_sleepers_{0};
  std::atomic<uint32_t> done_word_{0}, done_sleepers_{0};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace pycoll
