// The one wait primitive: every wait for another rank, or for a thread that works for it, is here.
// (Threads that have nothing to do sleep elsewhere.)
//
// A wait spins with pause, then yields, then sleeps on a futex in growing slices. Past the yields a
// waiter uses less than a tenth of a core.
//
// This folder uses the system only: errors, element types, waits, liveness, fork and thread guards.
// Read error.h and types.h first.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace pycoll {

struct WaitPolicy {
  uint32_t spins;                  // loads with pause before the first yield; few, for nothing
                                   // is checked meanwhile
  uint32_t yield_us;               // how long to yield before the first sleep
  uint32_t burst = 1;              // loads with pause after each yield
  uint32_t first_slice_us = 200;   // of sleep; every slice doubles,
  uint32_t last_slice_us = 10000;  // up to this one
  bool spread = false;             // there is a core for every rank: those that share one part
};

// Of waits that rarely happen.
inline constexpr WaitPolicy kPatient = {.spins = 100, .yield_us = 100};

// Ranks of a machine, and the cores that they may use together: more than this process may use, if
// each of them is bound to one of its own.
struct Sharing {
  uint32_t ranks = 1, cores = 1;
  bool crowded() const { return ranks > cores; }
};

// That of `ranks` ranks as far as a process can tell that asks nobody: all may use the cores that
// it may use itself.
Sharing sharing_own_cores(uint32_t ranks);

// The policy for ranks that share cores like that: no spins if they outnumber the cores, since the
// awaited rank is as likely to need this core, and never many, because other programs may need the
// core that it would run on.
WaitPolicy default_policy(Sharing sharing);

// The policy for waiting on a thread of this process that works in the background: no yields
// unless there are cores for both threads of every rank, since the thread that is awaited, or that
// of a peer, would get only half of this one's core.
WaitPolicy background_policy(Sharing sharing);

// What the system wakes a thread for, if that is not a word in memory.
class Alarm {
 public:
  // Sleeps until something may have changed, a signal, or `us` microseconds.
  virtual void sleep(uint32_t us) = 0;

 protected:
  ~Alarm() = default;
};

// What to sleep on: a 32-bit word that every event changes, and the count of those who sleep.
// A thread that makes an event stores it, then calls wake() if `sleepers` is not zero; store and
// load must be sequentially consistent. Without a word it is the alarm; a bell that has neither
// just sleeps for its slice.
struct Bell {
  const void* word = nullptr;
  std::atomic<uint32_t>* sleepers = nullptr;
  Alarm* alarm = nullptr;
};

// What a thread holds while it spins, and releases before it yields: Python's lock, and others.
class Held {
 public:
  virtual void let_go() = 0;

 protected:
  ~Held() = default;
};
inline constinit thread_local Held* held = nullptr;  // the latest, which lets go of all

inline void let_go_of_held() {
  if (held != nullptr) std::exchange(held, nullptr)->let_go();
}

// Locks a mutex, and lets go of what is held before it waits for that: whoever has the mutex may
// need it.
template <typename Mutex>
class Locked {
 public:
  explicit Locked(Mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    let_go_of_held();
    mutex_.lock();
  }
  ~Locked() { mutex_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  Mutex& mutex_;
};

// Locks a mutex, if it is wanted, until this thread would yield, or until the end of its scope. If
// the mutex is a ReentrantMutex, locking it inside costs little.
template <typename Mutex>
class LockedWhileSpinning final : public Held {
 public:
  LockedWhileSpinning(Mutex& mutex, bool wanted) : mutex_(mutex), locked_(wanted) {
    if (!wanted) return;
    if (!mutex_.try_lock()) {
      let_go_of_held();
      mutex_.lock();
    }
    before_ = std::exchange(held, this);
  }
  ~LockedWhileSpinning() {
    if (!locked_) return;
    held = before_;
    mutex_.unlock();
  }
  void let_go() override {
    locked_ = false;
    mutex_.unlock();
    if (before_ != nullptr) before_->let_go();
  }
  LockedWhileSpinning(const LockedWhileSpinning&) = delete;
  LockedWhileSpinning& operator=(const LockedWhileSpinning&) = delete;

 private:
  Mutex& mutex_;
  Held* before_ = nullptr;
  bool locked_;
};

// When a check is made: once, outside of a wait; after every yield; after every slice of sleep
// (also one that a signal cut short).
enum class Pulse : uint8_t { kOnce, kYield, kSlice };

// What differs from thread to thread, so that of two that share a core one leaves it first.
uint32_t own_patience();

// Notices that this thread shares a core with the one it waits for: in wait after wait, one yield
// brings what was awaited. The scheduler leaves two threads that keep yielding to each other on one
// core, for tens of milliseconds. It puts a woken thread on an idle core, but not if that is a
// virtual one that its host has taken away, as it does with idle ones; so such a thread sleeps and
// moves by turns. 25 of 200 short runs were 20 times as slow before.
class SharedCore {
 public:
  enum class Way : uint8_t { kYield, kSleep, kMove };

  // A wait has ended with the first yield, which took `ns`.
  void yielded(uint64_t ns) { in_a_row_ = ns >= kSwitchNs ? in_a_row_ + 1 : in_a_row_ / 2; }
  // A wait has gone on after its first yield.
  void waited() { in_a_row_ /= 2; }
  // How to wait next.
  Way way() {
    if (in_a_row_ < kMany || in_a_row_ < kMany + own_patience()) [[likely]]
      return Way::kYield;
    in_a_row_ = 0;
    slept_ = !slept_;
    return slept_ ? Way::kSleep : Way::kMove;
  }

 private:
  static constexpr uint64_t kSwitchNs = 1000;  // a yield without another thread takes less
  static constexpr uint32_t kMany = 16;
  uint32_t in_a_row_ = 0;
  bool slept_ = false;
};
inline constinit thread_local SharedCore shared_core;

// Leaves this core for any other that this thread may use; at most every 10 ms.
void leave_core();

uint64_t now_ns();
uint64_t coarse_ns();  // some milliseconds behind, at a fraction of the cost

// Asks the scheduler for slices of 0.1 ms instead of some 3 ms, once for each thread that comes to
// yield. Where ranks compete for cores, with each other or with strangers, a yield then costs the
// place in the queue for 0.1 ms, and a rank that is woken gets the core at once. The share of the
// processor stays the same. Takes effect since Linux 6.12; harmless before.
void shorten_slice();

// Wakes all that sleep on the bell, in any process that maps it. Costs a system call.
void wake(const Bell& bell);

// Wakes them if there are any.
inline void ring(const Bell& bell) {
  if (bell.sleepers->load(std::memory_order_seq_cst) != 0) [[unlikely]]
    wake(bell);
}

uint32_t load_bell(const Bell& bell);
// Sleeps until woken, a signal, `us` microseconds, or at once if the word is not `seen`.
void sleep_on(const Bell& bell, uint32_t seen, uint32_t us);

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Waits until ready() and returns true. check(Pulse) may throw, or return true to give up: then the
// result is that of a last ready(). `ready` must become true by a change of the bell's word.
template <typename Ready, typename Check>
bool wait_until(const WaitPolicy& policy, const Bell& bell, Ready&& ready, Check&& check) {
  for (uint32_t spin = 0; spin < policy.spins; ++spin) {
    if (ready()) return true;
    cpu_pause();
  }
  if (ready()) return true;
  let_go_of_held();
  SharedCore::Way way = SharedCore::Way::kYield;
  if (policy.spread && bell.word != nullptr) way = shared_core.way();
  if (way == SharedCore::Way::kMove) [[unlikely]]
    leave_core();
  if (policy.yield_us > 0 && way != SharedCore::Way::kSleep) {
    shorten_slice();
    const uint64_t begin = now_ns(), until = begin + uint64_t{policy.yield_us} * 1000;
    sched_yield();
    if (ready()) {
      shared_core.yielded(now_ns() - begin);
      return true;
    }
    shared_core.waited();
    for (;;) {
      for (uint32_t spin = 0; spin < policy.burst; ++spin) {
        if (ready()) return true;
        cpu_pause();
      }
      if (check(Pulse::kYield)) return ready();
      if (now_ns() >= until) break;
      sched_yield();
    }
  }
  struct Sleeper {  // counted while it may sleep, even when check throws
    std::atomic<uint32_t>* count;
    explicit Sleeper(std::atomic<uint32_t>* c) : count(c) {
      if (count != nullptr) count->fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() {
      if (count != nullptr) count->fetch_sub(1, std::memory_order_relaxed);
    }
  } sleeper(bell.sleepers);
  for (uint32_t slice_us = policy.first_slice_us;;) {
    const uint32_t seen = load_bell(bell);
    if (ready()) return true;
    sleep_on(bell, seen, slice_us);
    if (ready()) return true;
    if (check(Pulse::kSlice)) return ready();
    slice_us = slice_us < policy.last_slice_us / 2 ? 2 * slice_us : policy.last_slice_us;
  }
}

}  // namespace pycoll
