// Included before everything else when the engine is compiled for the simulation: its atomics,
// yields and robust locks become those of a simulated machine. The sources stay as they are.
//
// Every header of the system comes first, so that only the engine's own code is concerned.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <source_location>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulation {

using Order = std::memory_order;
using Where = std::source_location;

// The newest value stands at `at`; the machine knows the older ones that a load may still see.
uint64_t load(const void* at, unsigned bytes, Order order, const Where& where);
void store(void* at, unsigned bytes, uint64_t value, Order order, const Where& where);
// Stores change(old) unless `expected` is given and differs from the old value, which is returned.
uint64_t modify(void* at, unsigned bytes, const std::function<uint64_t(uint64_t)>& change,
                const uint64_t* expected, Order order, const Where& where);
void fence(Order order, const Where& where);
void forget(const void* at);  // an atomic begins its life there

void yield();
int process_id();
// Locks, of whatever address; they return what those of pthreads do.
int try_lock(const void* lock);
int lock(const void* lock);
int unlock(const void* lock);
void wait_for_notice(const void* condition, const void* lock, uint64_t until_ns = UINT64_MAX);
uint64_t now();  // simulated nanoseconds
void notify(const void* condition);
// Threads of the running process.
unsigned long thread_id();  // of the running one; never 0
uint32_t start_thread(std::function<void()> body);
void join_thread(uint32_t thread);
void sleep_ns(uint64_t ns);
ssize_t read_process(int pid, const iovec* to, const iovec* from);
// Plain memory that may be shared: the machine looks whether the accesses are ordered.
void* copy_memory(void* to, const void* from, size_t nbytes);

}  // namespace simulation

// The calls of the system that TCP needs; for other descriptors, the system's.
constexpr int kFirstSimulated = 1 << 20;
template <typename... Values>
int simulated_fcntl(int fd, int command, Values... values) {
  return fd >= kFirstSimulated ? 0 : fcntl(fd, command, values...);
}
int simulated_epoll_create(int flags);
int simulated_epoll_ctl(int set, int what, int fd, epoll_event* event);
int simulated_epoll_wait(int set, epoll_event* events, int most, int timeout_ms);
int simulated_eventfd(unsigned value, int flags);
int simulated_ioctl(int fd, unsigned long request, void* to);
int simulated_getsockopt(int fd, int level, int option, void* value, socklen_t* size);
int simulated_setsockopt(int fd, int level, int option, const void* value, socklen_t size);
int simulated_connect(int fd, const sockaddr* to, socklen_t size);
ssize_t simulated_sendmsg(int fd, const msghdr* message, int flags);
ssize_t simulated_recv(int fd, void* to, size_t nbytes, int flags);
ssize_t simulated_write(int fd, const void* from, size_t nbytes);
int simulated_eventfd_write(int fd, eventfd_t value);
int simulated_eventfd_read(int fd, eventfd_t* value);
int simulated_shutdown(int fd, int how);
int simulated_close(int fd);

namespace std {

using simulation::copy_memory;

inline void simulated_fence(memory_order order,
                            const source_location& where = source_location::current()) {
  simulation::fence(order, where);
}

class simulated_mutex {
 public:
  simulated_mutex() = default;
  simulated_mutex(const simulated_mutex&) = delete;
  void lock() { simulation::lock(this); }
  bool try_lock() { return simulation::try_lock(this) == 0; }
  void unlock() { simulation::unlock(this); }
};

class simulated_condition_variable {
 public:
  template <typename Ready>
  void wait(unique_lock<simulated_mutex>& lock, Ready ready) {
    while (!ready()) simulation::wait_for_notice(this, lock.mutex());
  }
  template <typename Ready>
  bool wait_for(unique_lock<simulated_mutex>& lock, chrono::nanoseconds time, Ready ready) {
    const uint64_t until = simulation::now() + uint64_t(time.count());
    while (!ready()) {
      if (simulation::now() >= until) return false;
      simulation::wait_for_notice(this, lock.mutex(), until);
    }
    return true;
  }
  void notify_one() { simulation::notify(this); }  // to others it is a wake-up without a reason
};

class simulated_thread {
 public:
  simulated_thread() = default;
  explicit simulated_thread(function<void()> body) : id_(simulation::start_thread(move(body))) {}
  simulated_thread(simulated_thread&& other) noexcept : id_(exchange(other.id_, kNone)) {}
  simulated_thread& operator=(simulated_thread&& other) noexcept {
    id_ = exchange(other.id_, kNone);
    return *this;
  }
  bool joinable() const { return id_ != kNone; }
  void join() { simulation::join_thread(exchange(id_, kNone)); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t id_ = kNone;
};

namespace simulated_this_thread {
inline void sleep_for(chrono::nanoseconds time) { simulation::sleep_ns(uint64_t(time.count())); }
}  // namespace simulated_this_thread

template <typename T>
class simulated_atomic {
  using Where = source_location;
  static constexpr memory_order kStrict = memory_order_seq_cst;

 public:
  static constexpr bool is_always_lock_free = true;
  simulated_atomic() noexcept : value_{} { simulation::forget(&value_); }
  constexpr simulated_atomic(T value) noexcept : value_(value) {
    if (!is_constant_evaluated()) simulation::forget(&value_);
  }
  simulated_atomic(const simulated_atomic&) = delete;
  simulated_atomic& operator=(const simulated_atomic&) = delete;

  T load(memory_order order = kStrict, const Where& where = Where::current()) const {
    return of(simulation::load(&value_, sizeof(T), order, where));
  }
  void store(T value, memory_order order = kStrict, const Where& where = Where::current()) {
    simulation::store(&value_, sizeof(T), bits(value), order, where);
  }
  T operator=(T value) {
    store(value);
    return value;
  }
  operator T() const { return load(); }
  T operator+=(T by) { return T(fetch_add(by) + by); }
  T operator++() { return *this += 1; }
  T operator++(int) { return fetch_add(1); }
  T operator--() { return T(fetch_sub(1) - 1); }
  T exchange(T value, memory_order order = kStrict, const Where& where = Where::current()) {
    return of(modify([=](uint64_t) { return bits(value); }, nullptr, order, where));
  }
  T fetch_add(T by, memory_order order = kStrict, const Where& where = Where::current()) {
    return of(modify([=](uint64_t old) { return bits(T(of(old) + by)); }, nullptr, order, where));
  }
  T fetch_sub(T by, memory_order order = kStrict, const Where& where = Where::current()) {
    return of(modify([=](uint64_t old) { return bits(T(of(old) - by)); }, nullptr, order, where));
  }
  T fetch_or(T by, memory_order order = kStrict, const Where& where = Where::current()) {
    return of(modify([=](uint64_t old) { return bits(T(of(old) | by)); }, nullptr, order, where));
  }
  T fetch_and(T by, memory_order order = kStrict, const Where& where = Where::current()) {
    return of(modify([=](uint64_t old) { return bits(T(of(old) & by)); }, nullptr, order, where));
  }
  bool compare_exchange_strong(T& expected, T value, memory_order order = kStrict,
                               const Where& where = Where::current()) {
    const uint64_t want = bits(expected);
    const uint64_t old = modify([=](uint64_t) { return bits(value); }, &want, order, where);
    expected = of(old);
    return old == want;
  }
  bool compare_exchange_weak(T& expected, T value, memory_order order = kStrict,
                             const Where& where = Where::current()) {
    return compare_exchange_strong(expected, value, order, where);
  }

 private:
  static uint64_t bits(T value) {
    uint64_t raw = 0;
    __builtin_memcpy(&raw, &value, sizeof(T));
    return raw;
  }
  static T of(uint64_t raw) {
    T value;
    __builtin_memcpy(&value, &raw, sizeof(T));
    return value;
  }
  uint64_t modify(const function<uint64_t(uint64_t)>& change, const uint64_t* expected,
                  memory_order order, const Where& where) {
    return simulation::modify(&value_, sizeof(T), change, expected, order, where);
  }

  alignas(sizeof(T)) T value_;
};

}  // namespace std

#define atomic simulated_atomic
#define atomic_thread_fence simulated_fence
#define mutex simulated_mutex
#define pthread_self simulation::thread_id
#define condition_variable simulated_condition_variable
#define thread simulated_thread
#define this_thread simulated_this_thread
#define memcpy copy_memory
#define sched_yield simulation::yield
#define getpid simulation::process_id
#define pthread_mutex_lock(it) simulation::lock(it)
#define pthread_mutex_trylock(it) simulation::try_lock(it)
#define pthread_mutex_unlock(it) simulation::unlock(it)
#define pthread_mutex_consistent(it) static_cast<void>(it)
#define pthread_sigmask(how, set, old) static_cast<void>(old)
#define process_vm_readv(pid, to, m, from, n, flags) simulation::read_process(pid, to, from)
#define epoll_create1 simulated_epoll_create
#define epoll_ctl simulated_epoll_ctl
#define epoll_wait simulated_epoll_wait
#define eventfd simulated_eventfd
#define eventfd_write simulated_eventfd_write
#define eventfd_read simulated_eventfd_read
#define fcntl simulated_fcntl
#define ioctl simulated_ioctl
#define getsockopt simulated_getsockopt
#define setsockopt simulated_setsockopt
#define connect simulated_connect
#define sendmsg simulated_sendmsg
#define recv simulated_recv
#define write simulated_write
#define shutdown simulated_shutdown
#define close simulated_close
