// A clock for programs in which one thread plays all ranks. While `g_alone` is set, nothing happens
// during a pause: the clock jumps to its end. For one source of a program.
#pragma once

#include <dlfcn.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

static std::atomic<bool> g_alone = false;
static std::atomic<uint64_t> g_jumped_ns = 0;
static constexpr uint64_t kSecond = 1'000'000'000;

template <typename F>
static F* real(const char* name, F*) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  static const auto get = real("clock_gettime", &clock_gettime);
  const int result = get(clock, now);
  const uint64_t ns = uint64_t(now->tv_nsec) + g_jumped_ns;
  now->tv_sec += time_t(ns / kSecond);
  now->tv_nsec = long(ns % kSecond);
  return result;
}

extern "C" int nanosleep(const timespec* time, timespec* left) {
  static const auto sleep = real("nanosleep", &nanosleep);
  if (!g_alone) return sleep(time, left);
  g_jumped_ns += uint64_t(time->tv_sec) * kSecond + uint64_t(time->tv_nsec);
  return 0;
}

extern "C" int sched_yield() noexcept {
  static const auto yield = real("sched_yield", &sched_yield);
  constexpr uint64_t kTurnNs = 50'000;
  if (!g_alone) return yield();
  g_jumped_ns += kTurnNs;
  return 0;
}
