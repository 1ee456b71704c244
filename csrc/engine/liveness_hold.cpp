#include "engine/liveness_hold.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/signals_blocked.h"

namespace pycoll {

// Takes and releases locks for others. Never freed: a child made by fork cannot tell what it holds.
class LivenessThread {
 public:
  explicit LivenessThread(LivenessThread* before) : before_(before) {}

  // The one that takes the next lock: the newest of this process, if it can hold another.
  static LivenessThread& with_room() {
    static std::atomic<LivenessThread*> newest{nullptr};
    LivenessThread* known = newest.load(std::memory_order_acquire);
    while (known == nullptr || !known->guard_.at_home() || known->full()) {
      auto* fresh = new LivenessThread(known);
      if (newest.compare_exchange_strong(known, fresh)) return *fresh;
      delete fresh;
    }
    return *known;
  }

  void take(pthread_mutex_t* lock) {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [this] { return !ending_; });
    if (!thread_.joinable()) start();
    ask(guard, {.lock = lock, .take = true});
  }

  void release(pthread_mutex_t* lock) {
    std::unique_lock guard(mutex_);
    if (!ask(guard, {.lock = lock, .take = false})) return;
    guard.unlock();
    thread_.join();
    guard.lock();
    ending_ = false;
    changed_.notify_all();
  }

 private:
  struct Request {
    pthread_mutex_t* lock;
    bool take;
    bool done = false, last = false;  // last: the thread ends
  };
  // The kernel looks at 2048 locks of a thread that has died; see ROBUST_LIST_LIMIT.
  static constexpr int64_t kMost = 1024;

  bool full() {
    const std::lock_guard guard(mutex_);
    return held_ >= kMost;
  }

  void start() {
    try {
      const SignalsBlocked blocked;
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error& error) {
      throw_error("TransportError",
                  "cannot start the thread that shows that this rank lives: ", error.what(),
                  "; raise the limit on processes (ulimit -u, pids.max) or on memory");
    }
  }

  // Returns whether the thread ends.
  bool ask(std::unique_lock<std::mutex>& guard, Request wanted) {
    ++waiting_;
    changed_.wait(guard, [this] { return request_ == nullptr; });
    request_ = &wanted;
    changed_.notify_all();
    changed_.wait(guard, [&] { return wanted.done; });
    return wanted.last;
  }

  void serve() {
    std::unique_lock guard(mutex_);
    while (!ending_) {
      changed_.wait(guard, [this] { return request_ != nullptr; });
      Request& next = *std::exchange(request_, nullptr);
      (next.take ? pthread_mutex_lock : pthread_mutex_unlock)(next.lock);
      held_ += next.take ? 1 : -1;
      --waiting_;
      next.last = ending_ = held_ == 0 && waiting_ == 0;
      next.done = true;
      changed_.notify_all();
    }
  }

  [[maybe_unused]] LivenessThread* const before_;  // so that none is lost
  const ForkGuard guard_;
  std::mutex mutex_;  // of the fields below
  std::condition_variable changed_;
  Request* request_ = nullptr;      // the one that is next
  int64_t held_ = 0, waiting_ = 0;  // locks; requests
  bool ending_ = false;
  std::thread thread_;
};

LivenessHold::LivenessHold(pthread_mutex_t* lock) : lock_(lock) {
  LivenessThread& thread = LivenessThread::with_room();
  thread.take(lock_);
  thread_ = &thread;
}

LivenessHold::~LivenessHold() {
  if (guard_.at_home()) thread_->release(lock_);
}

}  // namespace pycoll
