// Elements in registers: decoded to the accumulation type, combined, rounded once. The same
// arithmetic as csrc/kernels/fold/fold_lanes.inl, so the same bits (but for those inside a NaN).
#pragma once

#include <type_traits>

#include "base/types.h"
#include "cuda/kernels/primitives.h"

namespace pycoll::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};
// Floats of 8 bits. Without sign, kLargest is the code of the largest number; the next one is an
// infinity, or NaN where there is none, and kNan the NaN that a fold stores.
struct Float8E4M3 {
  static constexpr int kFraction = 3, kBias = 7;
  static constexpr uint8_t kLargest = 0x7e, kNan = 0x7f;
  static constexpr bool kHasInfinity = false;
  uint8_t bits;
};
struct Float8E5M2 {
  static constexpr int kFraction = 2, kBias = 15;
  static constexpr uint8_t kLargest = 0x7b, kNan = 0x7e;
  static constexpr bool kHasInfinity = true;
  uint8_t bits;
};
// A byte of something that is only moved, or combined bit by bit.
struct Bits {
  uint8_t bits;
};
// A truth value: true is whatever is not 0, and is stored as 1.
struct Truth {
  uint8_t byte;
};

template <typename T>
inline constexpr bool kIs8BitFloat = std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>;
// What is combined in float32, and rounded once.
template <typename T>
inline constexpr bool kIsNarrowFloat =
    std::is_same_v<T, Half> || std::is_same_v<T, BFloat> || kIs8BitFloat<T>;

template <typename T>
using Acc = std::conditional_t<kIsNarrowFloat<T>, float, T>;

template <typename V, int kCount>
struct Values {
  V v[kCount];
};

PYCOLL_DEVICE float bfloat_to_float(uint16_t bits) {
  return __builtin_bit_cast(float, uint32_t{bits} << 16);
}
// To nearest even; all NaNs become one, as on the CPU.
PYCOLL_DEVICE uint16_t float_to_bfloat(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((value != value ? 0x7fc00000u : rounded) >> 16);
}

// By way of float16; see fold_lanes.inl.
template <typename T, typename P>
PYCOLL_DEVICE float float8_to_float(const P& p, uint8_t bits) {
  if constexpr (T::kHasInfinity) {
    return p.half_to_float(static_cast<uint16_t>(bits << 8));
  } else {
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t half =
        (bits & 0x80u) << 8 | magnitude << 7 | (magnitude == T::kNan ? 0x7c00u : 0u);
    return p.half_to_float(static_cast<uint16_t>(half)) * 256.0f;
  }
}
template <typename T>
PYCOLL_DEVICE uint8_t float_to_float8(float value) {
  constexpr int kShift = 23 - T::kFraction;
  constexpr uint32_t kRebias = (127u - T::kBias) << 23, kHalfPlace = 1u << (kShift - 1);
  constexpr uint32_t kTooLarge = ((T::kLargest + 1u) << kShift) + kRebias;
  constexpr uint32_t kPlace = (127u + 24 - T::kBias - T::kFraction) << 23;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), full = bits & 0x7fffffffu;
  const uint32_t magnitude = full < kTooLarge ? full : kTooLarge;
  const uint32_t normal =
      (magnitude - kRebias + (kHalfPlace - 1) + ((magnitude >> kShift) & 1u)) >> kShift;
  const float rounded = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, kPlace);
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, rounded) - kPlace;
  const uint32_t finite = magnitude < kRebias + (1u << 23) ? subnormal : normal;
  const bool nan = T::kHasInfinity ? value != value : finite > T::kLargest;
  return static_cast<uint8_t>(nan ? T::kNan : finite | (bits >> 24 & 0x80u));
}

template <ReduceOp kOp, typename V>
PYCOLL_DEVICE V combine(V a, V b) {
  if constexpr (kOp == ReduceOp::kSum) {
    return static_cast<V>(a + b);
  } else if constexpr (kOp == ReduceOp::kProd && std::is_integral_v<V>) {
    return static_cast<V>(1u * a * b);  // not in int, to which small types promote: it overflows
  } else if constexpr (kOp == ReduceOp::kProd) {
    return a * b;
  } else if constexpr (kOp == ReduceOp::kMin) {
    return ((a < b) | (a != a)) ? a : b;
  } else if constexpr (kOp == ReduceOp::kMax) {
    return ((a > b) | (a != a)) ? a : b;
  } else if constexpr (kOp == ReduceOp::kAnd) {
    return static_cast<V>(a & b);
  } else if constexpr (kOp == ReduceOp::kOr) {
    return static_cast<V>(a | b);
  } else {
    static_assert(kOp == ReduceOp::kXor, "combine() lacks this operation");
    return static_cast<V>(a ^ b);
  }
}

// What the closing division of avg divides by; n == 0: nothing.
struct Scale {
  uint32_t n;
  bool is_signed;  // integers are summed without sign, and divided with it
};

template <typename V>
PYCOLL_DEVICE V divide(V value, Scale scale) {
  if constexpr (std::is_floating_point_v<V>) {
    return value / static_cast<V>(scale.n);
  } else {
    using Signed = std::make_signed_t<V>;
    using Wide = std::conditional_t<sizeof(V) <= 4, int64_t, Signed>;
    if (scale.is_signed) {
      return static_cast<V>(static_cast<Wide>(static_cast<Signed>(value)) / Wide{scale.n});
    }
    return static_cast<V>(value / static_cast<std::common_type_t<V, uint32_t>>(scale.n));
  }
}

// How kBytes bytes of T become values, and back.
template <typename P, typename T, int kBytes>
struct Lanes {
  // Bits, and truth values, are taken as whole words where there are some.
  static constexpr bool kBits = std::is_same_v<T, Bits> || std::is_same_v<T, Truth>;
  using Word = std::remove_cvref_t<decltype(Raw<kBytes>{}.w[0])>;
  static constexpr int kCount = kBits ? sizeof(Raw<kBytes>) / sizeof(Word) : kBytes / sizeof(T);
  using V = std::conditional_t<kBits, Word, Acc<T>>;
  using Vals = Values<V, kCount>;

  static PYCOLL_DEVICE Vals decode(const P& p, const Raw<kBytes>& raw) {
    if constexpr (kIs8BitFloat<T>) {
      const auto in = __builtin_bit_cast(Values<uint8_t, kCount>, raw);
      Vals out;
      PYCOLL_UNROLL
      for (int i = 0; i < kCount; ++i) out.v[i] = float8_to_float<T>(p, in.v[i]);
      return out;
    } else if constexpr (kIsNarrowFloat<T>) {
      const auto in = __builtin_bit_cast(Values<uint16_t, kCount>, raw);
      Vals out;
      PYCOLL_UNROLL
      for (int i = 0; i < kCount; ++i) {
        out.v[i] = std::is_same_v<T, Half> ? p.half_to_float(in.v[i]) : bfloat_to_float(in.v[i]);
      }
      return out;
    } else if constexpr (std::is_same_v<T, Truth>) {
      constexpr Word kOnes = Word(~Word{0}) / 255, kLow = kOnes * 127;  // in every byte
      auto out = __builtin_bit_cast(Vals, raw);
      PYCOLL_UNROLL
      for (Word& w : out.v) w = static_cast<Word>((((w & kLow) + kLow) | w) >> 7 & kOnes);
      return out;
    } else {
      return __builtin_bit_cast(Vals, raw);
    }
  }

  static PYCOLL_DEVICE Raw<kBytes> encode(const P& p, const Vals& vals) {
    if constexpr (kIs8BitFloat<T>) {
      Values<uint8_t, kCount> out;
      PYCOLL_UNROLL
      for (int i = 0; i < kCount; ++i) out.v[i] = float_to_float8<T>(vals.v[i]);
      return __builtin_bit_cast(Raw<kBytes>, out);
    } else if constexpr (kIsNarrowFloat<T>) {
      Values<uint16_t, kCount> out;
      PYCOLL_UNROLL
      for (int i = 0; i < kCount; ++i) {
        out.v[i] =
            std::is_same_v<T, Half> ? p.float_to_half(vals.v[i]) : float_to_bfloat(vals.v[i]);
      }
      return __builtin_bit_cast(Raw<kBytes>, out);
    } else {
      return __builtin_bit_cast(Raw<kBytes>, vals);
    }
  }
};

template <ReduceOp kOp, typename V, int kCount>
PYCOLL_DEVICE Values<V, kCount> combine(const Values<V, kCount>& a, const Values<V, kCount>& b) {
  Values<V, kCount> out;
  PYCOLL_UNROLL
  for (int i = 0; i < kCount; ++i) out.v[i] = combine<kOp>(a.v[i], b.v[i]);
  return out;
}

template <typename V, int kCount>
PYCOLL_DEVICE Values<V, kCount> divide(Values<V, kCount> a, Scale scale) {
  PYCOLL_UNROLL
  for (int i = 0; i < kCount; ++i) a.v[i] = divide(a.v[i], scale);
  return a;
}

}  // namespace pycoll::cuda
