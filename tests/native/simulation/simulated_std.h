// Included before everything else when the engine is compiled for the simulation: its atomics,
// yields and robust locks become those of a simulated machine. The sources stay as they are.
//
// Every header of the system comes first, so that only the engine's own code is concerned.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <iostream>
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
int try_lock(pthread_mutex_t* lock);
int unlock(pthread_mutex_t* lock);
int process_id();
ssize_t read_process(int pid, const iovec* to, const iovec* from);
// Plain memory that may be shared: the machine looks whether the accesses are ordered.
void* copy_memory(void* to, const void* from, size_t nbytes);

}  // namespace simulation

namespace std {

using simulation::copy_memory;

inline void simulated_fence(memory_order order,
                            const source_location& where = source_location::current()) {
  simulation::fence(order, where);
}

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
#define memcpy copy_memory
#define sched_yield simulation::yield
#define getpid simulation::process_id
#define pthread_mutex_trylock simulation::try_lock
#define pthread_mutex_unlock simulation::unlock
#define pthread_mutex_consistent(lock) static_cast<void>(lock)
#define process_vm_readv(pid, to, m, from, n, flags) simulation::read_process(pid, to, from)
