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
// A byte of something that is only moved, or combined bit by bit.
struct Bits {
  uint8_t bits;
};
// A truth value: true is whatever is not 0, and is stored as 1.
struct Truth {
  uint8_t byte;
};

template <typename T>
inline constexpr bool kIs16BitFloat = std::is_same_v<T, Half> || std::is_same_v<T, BFloat>;

template <typename T>
using Acc = std::conditional_t<kIs16BitFloat<T>, float, T>;

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
    if constexpr (kIs16BitFloat<T>) {
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
    if constexpr (kIs16BitFloat<T>) {
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
