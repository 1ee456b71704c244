#include "kernels/isa.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pycoll {
namespace {

constinit std::atomic<const Kernels*> g_chosen{nullptr};  // null until the first use

#if defined(__x86_64__)
const Kernels* usable_avx2() {
  __builtin_cpu_init();
  const bool usable = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2");
  return usable ? &kAvx2Kernels : nullptr;
}

const Kernels* usable_avx512() {
  __builtin_cpu_init();
  const bool usable = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2") &&
                      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return usable ? &kAvx512Kernels : nullptr;
}
#else
const Kernels* usable_avx2() { return nullptr; }
const Kernels* usable_avx512() { return nullptr; }
#endif

[[gnu::noinline]] const Kernels& choose() {
  const Kernels* widest = usable_avx512();
  if (widest == nullptr) widest = usable_avx2();
  if (widest == nullptr) widest = &kBaseKernels;
  if (widest == nullptr) {
    std::fputs("pycoll was built with PYCOLL_ISA=native, for another processor\n", stderr);
    std::abort();
  }
  const Kernels* forced = nullptr;
  return g_chosen.compare_exchange_strong(forced, widest) ? *widest : *forced;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* chosen = g_chosen.load(std::memory_order_relaxed);  // points to constants
  return chosen != nullptr ? *chosen : choose();
}

const char* isa_name() { return kernels().name; }

bool force_isa(const char* name) {
  for (const Kernels* table : {usable_avx512(), usable_avx2(), &kBaseKernels}) {
    if (table == nullptr || std::strcmp(table->name, name) != 0) continue;
    g_chosen.store(table);
    return true;
  }
  return false;
}

}  // namespace pycoll
