// The helper thread of a rank: it runs calls in the background.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "base/wait.h"

namespace pycoll {

// One thread that runs queued work, first in first out, one at a time. Signals are blocked in it.
// Threads that wait help: they run work that has not begun. In a child made by fork only abandon()
// may be called.
class HelperThread {
 public:
  using Ticket = uint64_t;
  // `helped`: it runs on a thread that waits for it, where signals may be checked.
  using Work = std::function<void(bool helped)>;

  // Starts the thread. How ranks share cores decides how to wait; `queued`, if given, shows how
  // much has not begun.
  explicit HelperThread(Sharing sharing, std::atomic<uint32_t>* queued = nullptr);
  ~HelperThread() { stop(); }
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;

  // When the thread looks at work that is queued: at once, for which it may have to be woken; or
  // within two naps, so that whoever waits soon runs it instead. Naps are as long as the first one,
  // and longer while others run all work.
  enum class Start : uint8_t { kNow, kSoon };
  static constexpr uint32_t kNapUs = 100, kLongNapUs = 800;

  // Queues work; an exception it throws is kept for error(). Tickets count up from 1. This, help()
  // and wait() throw ConcurrentUseError inside of a wait of the same thread: in a signal handler.
  Ticket submit(Work work, Start start = Start::kNow);

  // Whether everything submitted has finished.
  bool idle() const { return done(last()); }
  bool done(Ticket ticket) const { return finished_.load(std::memory_order_acquire) >= ticket; }

  // Runs queued work up to the ticket, on this thread, until another thread runs some of it: that
  // saves waking the helper thread, and waiting for it. Throws "Interrupted" if an interrupt ended
  // some of it; whoever waits for that work gets "Revoked".
  void help(Ticket ticket);

  // Waits until the ticket is done. give_up() is called at the pulses of wait_until; it throws, or
  // returns true to stop waiting: then the result is false. Throws nothing of the work itself.
  bool wait(Ticket ticket, const std::function<bool(Pulse)>& give_up);

  // Of the work submitted last; 0 before any.
  Ticket last() const { return submitted_.load(std::memory_order_relaxed); }

  // The exception that the work of a finished ticket threw, until forget(); null if none.
  std::exception_ptr error(Ticket ticket);
  void forget(Ticket ticket);

  // Finishes what is queued and joins. Idempotent.
  void stop();

  // In a child made by fork, where the thread does not exist: forgets it.
  void abandon();

 private:
  class Waiting;
  void serve();
  void await_work();
  bool waits(Ticket until) const;  // work up to this ticket, for a thread to run it
  bool over() const;
  void refuse_nested() const;
  bool run_next(bool helped);  // false if there is nothing to run, or another thread runs work
  void notify(std::atomic<uint32_t>& word, const Bell& bell);
  void tell_of_work(Start start);
  void show_queue();  // under mutex_

  const WaitPolicy policy_;
  std::atomic<uint32_t>* const queued_;
  std::mutex mutex_;  // of queue_, errors_ and all changes of the counts; never held while waiting
  std::deque<Work> queue_;
  std::map<Ticket, std::exception_ptr> errors_;
  std::atomic<uint64_t> submitted_{0}, started_{0}, finished_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> work_word_{0}, work_sleepers_{0};
  std::atomic<Ticket> urgent_{0};                      // the latest that is to start now
  std::atomic<uint32_t> urgent_word_{0}, nappers_{0};  // the thread sleeps, but not for long
  std::atomic<uint32_t> done_word_{0}, done_sleepers_{0};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace pycoll
