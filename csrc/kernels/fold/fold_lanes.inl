// Elements in registers: how each dtype is loaded, combined, rounded and stored. Part of
// fold_kernels.inl, which says where it may be included.

#define PYCOLL_INLINE __attribute__((always_inline)) inline

// ---- elements --------------------------------------------------------------------------------

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

// The accumulation type.
template <typename T>
using Acc = std::conditional_t<kIsNarrowFloat<T>, float,
                               std::conditional_t<std::is_same_v<T, Truth>, uint8_t, T>>;

template <typename T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <typename T>
struct VecOf<T, 1> {
  using type = T;
};
template <typename T, int N>
using Vec = typename VecOf<T, N>::type;

template <typename To, int N, typename From>
PYCOLL_INLINE Vec<To, N> convert(From v) {
  if constexpr (N == 1) {
    return static_cast<To>(v);
  } else {
    return __builtin_convertvector(v, Vec<To, N>);
  }
}

// Through an unaligned type, not memcpy: GCC 12 moves 16 bytes of memcpy in two general registers.
template <typename V>
struct Unaligned {
  typedef V type __attribute__((aligned(1), may_alias));
};

template <typename V>
PYCOLL_INLINE V load_raw(const char* p) {
  return *reinterpret_cast<const typename Unaligned<V>::type*>(p);
}

template <typename V>
PYCOLL_INLINE void store_raw(char* p, V v) {
  *reinterpret_cast<typename Unaligned<V>::type*>(p) = v;
}

// float16 in integer arithmetic. A subnormal half is made by a subtraction, and rounded by an
// addition, of a power of two whose last place is that of the subnormals: both see normal floats
// only, or inputs that round to zero anyway, so flush-to-zero modes do not change the result.
template <int N>
Vec<float, N> load_half(const char* p) {
  using U = Vec<uint32_t, N>;
  using F = Vec<float, N>;
  const U half = convert<uint32_t, N>(load_raw<Vec<uint16_t, N>>(p));
  const U magnitude = (half & 0x7fffu) << 13;
  const U normal = magnitude + (112u << 23);
  const F two_to_minus_14 = __builtin_bit_cast(F, U{} + (113u << 23));
  const F shifted = __builtin_bit_cast(F, U(normal + (1u << 23)));
  const U subnormal = __builtin_bit_cast(U, F(shifted - two_to_minus_14));
  const U special = (magnitude | (255u << 23)) | (magnitude << 9 != 0 ? U{} + (1u << 22) : U{});
  const U finite = magnitude < (1u << 23) ? subnormal : normal;
  const U bits = magnitude >= (31u << 23) ? special : finite;
  return __builtin_bit_cast(F, U(bits | ((half & 0x8000u) << 16)));
}

template <int N>
Vec<uint16_t, N> pack_half(Vec<float, N> v) {
  using U = Vec<uint32_t, N>;
  using F = Vec<float, N>;
  const U bits = __builtin_bit_cast(U, v);
  const U magnitude = bits & 0x7fffffffu;
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const U half_bits = U{} + (126u << 23);
  const F half = __builtin_bit_cast(F, half_bits);
  const F rounded = __builtin_bit_cast(F, magnitude) + half;
  const U subnormal = __builtin_bit_cast(U, rounded) - half_bits;
  const U nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  const U special = magnitude > (255u << 23) ? nan : U{} + 0x7c00u;
  const U finite = magnitude < (113u << 23) ? subnormal : normal;
  const U result = magnitude >= (143u << 23) ? special : finite;
  return convert<uint16_t, N>(U(result | (bits >> 16 & 0x8000u)));
}

// Loads 16-bit lanes zero-extended to 32 bits.
template <int N>
Vec<uint32_t, N> load_widened(const char* p) {
  return convert<uint32_t, N>(load_raw<Vec<uint16_t, N>>(p));
}

template <int N>
PYCOLL_INLINE Vec<float, N> load_bfloat(const char* p) {
  return __builtin_bit_cast(Vec<float, N>, Vec<uint32_t, N>(load_widened<N>(p) << 16));
}

// Rounds to the upper 16 bits of the result; the lower ones are arbitrary. All NaNs become one.
template <int N>
PYCOLL_INLINE Vec<uint32_t, N> round_bfloat(Vec<float, N> v) {
  using U = Vec<uint32_t, N>;
  const U bits = __builtin_bit_cast(U, v);
  const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return v != v ? U{} + 0x7fc00000u : rounded;
}

// Rounds two vectors to the lower and the upper halves of 32-bit words.
template <int N>
PYCOLL_INLINE Vec<uint32_t, N> pack_bfloats(Vec<float, N> low, Vec<float, N> high) {
  return (round_bfloat<N>(low) >> 16) | (round_bfloat<N>(high) & 0xffff0000u);
}

// Loads bytes sign-extended to 16 bits.
template <int N>
Vec<int16_t, N> load_signed_bytes(const char* p) {
  return convert<int16_t, N>(load_raw<Vec<int8_t, N>>(p));
}

// 8-bit floats are halves of fewer bits: e5m2 is the upper byte of one, and e4m3fn has the same
// fields with exponents 2^8 lower, but for its NaN.
template <typename T, int N>
PYCOLL_INLINE Vec<float, N> load_float8(const char* p) {
  using H = Vec<uint16_t, N>;
  const H byte = (H)load_signed_bytes<N>(p);
  if constexpr (T::kHasInfinity) {
    const H half = byte << 8;
    return load_half<N>(reinterpret_cast<const char*>(&half));
  } else {
    const H fields = byte << 7;  // the sign twice: bit 14 is none
    const H magnitude = fields & uint16_t{0x3f80};
    const H nan = magnitude == uint16_t{0x3f80} ? H{} + uint16_t{0x7c00} : H{};
    const H half = (fields & uint16_t{0xbfff}) | nan;
    return load_half<N>(reinterpret_cast<const char*>(&half)) * 256.0f;
  }
}

// To nearest even, subnormals as in pack_half. What is too large becomes the code behind the
// largest number; all NaNs become one. Magnitudes are compared as signed numbers, for which every
// instruction set has an instruction.
template <typename T, int N>
PYCOLL_INLINE Vec<uint8_t, N> pack_float8(Vec<float, N> v) {
  using I = Vec<int32_t, N>;
  using F = Vec<float, N>;
  constexpr int kShift = 23 - T::kFraction;
  constexpr int32_t kRebias = (127 - T::kBias) << 23, kHalfPlace = 1 << (kShift - 1);
  constexpr int32_t kTooLarge = ((T::kLargest + 1) << kShift) + kRebias;
  const I bits = __builtin_bit_cast(I, v);
  const I full = bits & 0x7fffffff;
  const I magnitude = full < kTooLarge ? full : I{} + kTooLarge;
  const I normal = (magnitude + (kHalfPlace - 1 - kRebias) + ((magnitude >> kShift) & 1)) >> kShift;
  const I place_bits = I{} + ((127 + 24 - T::kBias - T::kFraction) << 23);
  const F rounded = __builtin_bit_cast(F, magnitude) + __builtin_bit_cast(F, place_bits);
  const I subnormal = __builtin_bit_cast(I, rounded) - place_bits;
  const I finite = magnitude < kRebias + (1 << 23) ? subnormal : normal;
  const I sign = bits >> 24 & 0x80;
  if constexpr (T::kHasInfinity) {
    return convert<uint8_t, N>(full > (255 << 23) ? I{} + T::kNan : I(finite | sign));
  } else {
    return convert<uint8_t, N>(finite > T::kLargest ? I{} + T::kNan : I(finite | sign));
  }
}

// ---- lanes -----------------------------------------------------------------------------------

// How N lanes of accumulators are read as In and written as Out.
template <typename In, typename Out, int N>
struct Lanes {
  using V = Vec<Acc<In>, N>;
  static constexpr size_t kBytes = N * sizeof(In);

  static PYCOLL_INLINE V load(const char* p) {
    if constexpr (std::is_same_v<In, Half>) {
      return load_half<N>(p);
    } else if constexpr (std::is_same_v<In, BFloat>) {
      return load_bfloat<N>(p);
    } else if constexpr (kIs8BitFloat<In>) {
      return load_float8<In, N>(p);
    } else if constexpr (std::is_same_v<In, Truth>) {
      const V v = load_raw<V>(p), one = V{} + uint8_t{1};
      return v < one ? v : one;
    } else {
      return load_raw<V>(p);
    }
  }

  // The bits that are stored.
  static PYCOLL_INLINE auto pack(V v) {
    if constexpr (std::is_same_v<Out, Half>) {
      return pack_half<N>(v);
    } else if constexpr (std::is_same_v<Out, BFloat>) {
      return convert<uint16_t, N>(Vec<uint32_t, N>(round_bfloat<N>(v) >> 16));
    } else if constexpr (kIs8BitFloat<Out>) {
      return pack_float8<Out, N>(v);
    } else {
      return v;
    }
  }
};

// bfloat16 to bfloat16 takes the two halves of each 32-bit word apart, in place: no lane moves.
template <int N>
struct BFloatPair {
  Vec<float, N> low;
  Vec<float, N> high;
};

template <int N>
  requires(N > 1)
struct Lanes<BFloat, BFloat, N> {
  using V = BFloatPair<N>;
  using U = Vec<uint32_t, N>;
  static constexpr size_t kBytes = N * sizeof(uint32_t);

  static PYCOLL_INLINE V load(const char* p) {
    using F = Vec<float, N>;
    const U bits = load_raw<U>(p);
    return {__builtin_bit_cast(F, U(bits << 16)), __builtin_bit_cast(F, U(bits & 0xffff0000u))};
  }

  static PYCOLL_INLINE U pack(const V& v) { return pack_bfloats<N>(v.low, v.high); }
};

// ---- operations ------------------------------------------------------------------------------

template <ReduceOp O, typename V>
PYCOLL_INLINE V combine(V a, V b) {
  if constexpr (O == ReduceOp::kSum || O == ReduceOp::kAvg) {
    return a + b;
  } else if constexpr (O == ReduceOp::kProd && std::is_integral_v<V>) {
    return static_cast<V>(1u * a * b);  // not in int, to which small types promote: it overflows
  } else if constexpr (O == ReduceOp::kProd) {
    return a * b;
  } else if constexpr (O == ReduceOp::kMin) {
    return ((a < b) | (a != a)) ? a : b;
  } else if constexpr (O == ReduceOp::kMax) {
    return ((a > b) | (a != a)) ? a : b;
  } else if constexpr (O == ReduceOp::kAnd) {
    return a & b;
  } else if constexpr (O == ReduceOp::kOr) {
    return a | b;
  } else {
    static_assert(O == ReduceOp::kXor, "combine() lacks this operation");
    return a ^ b;
  }
}

template <ReduceOp O, int N>
PYCOLL_INLINE BFloatPair<N> combine(const BFloatPair<N>& a, const BFloatPair<N>& b) {
  return {combine<O>(a.low, b.low), combine<O>(a.high, b.high)};
}

template <int N>
PYCOLL_INLINE BFloatPair<N> operator/(const BFloatPair<N>& v, float divisor) {
  return {v.low / divisor, v.high / divisor};
}
