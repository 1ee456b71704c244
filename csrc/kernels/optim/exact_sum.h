// The fixed-point accumulator of optim.h: how numbers are added to it, on every machine.
#pragma once

#include "kernels/optim/optim.h"

#if defined(__CUDACC__)
#define PYCOLL_LIMBS __host__ __device__ __forceinline__
#else
#define PYCOLL_LIMBS inline
#endif

namespace pycoll {

inline constexpr uint64_t kLimbMask = 0xffffffffu;

// mantissa * 2^(place - kExactBias); mantissa < 2^53.
struct FixedPoint {
  uint64_t mantissa;
  uint32_t place;
};

// The magnitude of a finite double.
PYCOLL_LIMBS FixedPoint magnitude_of(double value) {
  const uint64_t bits = __builtin_bit_cast(uint64_t, value);
  const uint32_t exponent = static_cast<uint32_t>(bits >> 52) & 2047u;
  const uint64_t fraction = bits & ((uint64_t(1) << 52) - 1);
  return {exponent == 0 ? fraction : fraction | (uint64_t(1) << 52),
          (exponent == 0 ? 1u : exponent) + (kExactBias - 1075)};
}

// Adds sign * x to limbs that lie `stride` apart; `limbs` is limb 0. In [0, 2^32) before, they stay
// within 63 bits for 2^10 additions.
// Source: Neal, "Fast exact summation using small and large superaccumulators", arXiv 1505.05571,
// section 3.
PYCOLL_LIMBS void deposit(FixedPoint x, int64_t sign, int64_t* limbs, size_t stride) {
  const uint32_t shift = x.place & 31u;
  int64_t* const limb = limbs + (x.place >> 5) * stride;
  limb[0] += sign * static_cast<int64_t>((x.mantissa << shift) & kLimbMask);
  limb[stride] += sign * static_cast<int64_t>(x.mantissa >> (32 - shift));
}

// Brings `count` limbs back to [0, 2^32), except the last.
PYCOLL_LIMBS void propagate_carries(int64_t* limbs, int count, size_t stride) {
  int64_t carry = 0;
  for (int i = 0; i < count - 1; ++i) {
    const int64_t sum = limbs[i * stride] + carry;
    carry = sum >> 32;
    limbs[i * stride] = sum & static_cast<int64_t>(kLimbMask);
  }
  limbs[(count - 1) * stride] += carry;
}

}  // namespace pycoll
