// Which instruction set kernels use: the widest that this CPU has, looked up once per process.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>

namespace pycoll {

// Whether this CPU has what the kernels named so are compiled for.
inline bool has_avx2() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

inline bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// Whether "rep movsb" is fast, as the processor itself says (FSRM: Intel since Ice Lake, AMD since
// Zen 3).
inline bool has_fast_string() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kFsrm = 1u << 4;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kFsrm) != 0;
#else
  return false;
#endif
}

// Whether AMD has made this CPU.
inline bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// The tables of kernels of one kind, one for each instruction set; a table has a `name`.
// Thread-safe.
template <typename Table>
class Dispatch {
 public:
  constexpr explicit Dispatch(const Table* base, const Table* avx2 = nullptr,
                              const Table* avx512 = nullptr)
      : base_(base), avx2_(avx2), avx512_(avx512) {}

  const Table& current() {
    const Table* chosen = chosen_.load(std::memory_order_relaxed);  // points to constants
    return chosen != nullptr ? *chosen : resolve();
  }

  // For tests: uses the table of this name from now on. False if there is none for this CPU.
  bool force(const char* name) {
    for (const Table* table : {usable_avx512(), usable_avx2(), base_}) {
      if (table == nullptr || std::strcmp(table->name, name) != 0) continue;
      chosen_.store(table);
      return true;
    }
    return false;
  }

 private:
  const Table* usable_avx2() const { return has_avx2() ? avx2_ : nullptr; }
  const Table* usable_avx512() const { return has_avx512() ? avx512_ : nullptr; }

  [[gnu::noinline]] const Table& resolve() {
    const Table* widest = base_;
    if (usable_avx2() != nullptr) widest = usable_avx2();
    if (usable_avx512() != nullptr) widest = usable_avx512();
    const Table* forced = nullptr;
    return chosen_.compare_exchange_strong(forced, widest) ? *widest : *forced;
  }

  const Table *base_, *avx2_, *avx512_;
  std::atomic<const Table*> chosen_{nullptr};  // null until the first use
};

}  // namespace pycoll
