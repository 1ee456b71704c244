// Accesses to multicast addresses, which sm_90 has: PTX ISA, "multimem.ld_reduce", "multimem.st".
//
// They are relaxed and of system scope. The array is reached by its own address too, before and
// behind: fence.proxy.alias orders accesses to one place by different addresses. In between, flags
// order ranks as for plain accesses.
#pragma once

#include "cuda/kernels/elements.h"
#include "cuda/kernels/primitives.h"

namespace pycoll::cuda {

class MulticastPolicy : public DevicePolicy {
 public:
  using DevicePolicy::DevicePolicy;

  PYCOLL_DEVICE void begin_multicast() const { asm volatile("fence.proxy.alias;" ::: "memory"); }
  PYCOLL_DEVICE void end_multicast() const { asm volatile("fence.proxy.alias;" ::: "memory"); }

  // The sum of a pack over all ranks, rounded once where elements have 16 bits.
  template <typename T>
  PYCOLL_DEVICE Raw<16> sum_of_all(const char* at) const {
    Raw<16> sum;
#define PYCOLL_SUM_OF_ALL(type)                                                        \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0,%1,%2,%3},[%4];" \
               : "=r"(sum.w[0]), "=r"(sum.w[1]), "=r"(sum.w[2]), "=r"(sum.w[3])        \
               : "l"(__cvta_generic_to_global(at))                                     \
               : "memory")
    if constexpr (std::is_same_v<T, Half>) {
      PYCOLL_SUM_OF_ALL(".acc::f32.v4.f16x2");
    } else if constexpr (std::is_same_v<T, BFloat>) {
      PYCOLL_SUM_OF_ALL(".acc::f32.v4.bf16x2");
    } else {
      Values<float, 4> f;
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3},[%4];"
                   : "=f"(f.v[0]), "=f"(f.v[1]), "=f"(f.v[2]), "=f"(f.v[3])
                   : "l"(__cvta_generic_to_global(at))
                   : "memory");
      sum = __builtin_bit_cast(Raw<16>, f);
    }
#undef PYCOLL_SUM_OF_ALL
    return sum;
  }

  // Stores a pack in the heaps of all ranks; the type makes no difference to the bits.
  template <typename T>
  PYCOLL_DEVICE void store_to_all(char* at, const Raw<16>& pack) const {
    const auto f = __builtin_bit_cast(Values<float, 4>, pack);
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0],{%1,%2,%3,%4};" ::"l"(
                     __cvta_generic_to_global(at)),
                 "f"(f.v[0]), "f"(f.v[1]), "f"(f.v[2]), "f"(f.v[3])
                 : "memory");
  }
};

}  // namespace pycoll::cuda
