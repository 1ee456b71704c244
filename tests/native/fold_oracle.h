// What a fold must give, written independently of csrc/kernels: trees level by level on a vector,
// and narrow floats by arithmetic on doubles instead of bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace oracle {

using pycoll::ReduceOp;

// A float of kFraction fraction bits, and an exponent range of [kMinExponent, kMaxExponent].
template <typename B, int kFraction, int kMinExponent, int kMaxExponent>
struct SmallFloat {
  using Bits = B;
  static constexpr int kSign = 1 << (8 * sizeof(Bits) - 1);
  using Value = float;

  static Value decode(Bits bits) {
    const int fraction = bits & ((1 << kFraction) - 1);
    const int exponent = (bits & (kSign - 1)) >> kFraction;
    const double sign = bits & kSign ? -1.0 : 1.0;
    if (exponent == kMaxExponent - kMinExponent + 2) {
      return fraction != 0 ? NAN : static_cast<float>(sign * INFINITY);
    }
    const int implicit = exponent > 0 ? 1 << kFraction : 0;
    const int scale = std::max(exponent, 1) + kMinExponent - 1 - kFraction;
    return static_cast<float>(sign * std::ldexp(fraction + implicit, scale));
  }

  static Bits encode(Value value) {
    const int all_ones = (kMaxExponent - kMinExponent + 2) << kFraction;
    const int sign = std::signbit(value) ? kSign : 0;
    if (std::isnan(value)) return static_cast<Bits>(sign | all_ones | 1 << (kFraction - 1));
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude == 0) return static_cast<Bits>(sign);
    if (std::isinf(magnitude)) return static_cast<Bits>(sign | all_ones);
    const int exponent = std::max(std::ilogb(magnitude), kMinExponent);
    // Rounds to nearest even in the default rounding mode. A carry into the next binade, and into
    // infinity, is the right encoding by itself.
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, kFraction - exponent)));
    const int bits = steps + ((exponent - kMinExponent) << kFraction);
    return static_cast<Bits>(sign | std::min(bits, all_ones));
  }
};

// float8_e4m3fn, by a search: 448 is its largest number, and NaN takes the place of an infinity.
struct Float8E4M3 {
  using Bits = uint8_t;
  using Value = float;

  static Value decode(Bits bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return static_cast<float>(bits & 0x80 ? -magnitude : magnitude);
  }

  static Bits encode(Value value) {
    if (!(std::fabs(value) <= 464)) return 0x7f;  // half way to what would be the next number
    const auto distance = [&](int code) {
      return std::fabs(std::fabs(double{value}) - double{decode(static_cast<Bits>(code))});
    };
    int best = 0;
    for (int code = 1; code < 0x7f; ++code) {
      const double more = distance(code) - distance(best);
      if (more < 0 || (more == 0 && code % 2 == 0)) best = code;
    }
    return static_cast<Bits>(best | (std::signbit(value) ? 0x80 : 0));
  }
};

template <typename T>
struct Plain {
  using Bits = T;
  using Value = T;
  static Value decode(Bits bits) { return bits; }
  static Bits encode(Value value) { return value; }
};

using Float16 = SmallFloat<uint16_t, 10, -14, 15>;
using BFloat16 = SmallFloat<uint16_t, 7, -126, 127>;
using Float8E5M2 = SmallFloat<uint8_t, 2, -14, 15>;

// The only NaN that a fold gives; 0: any.
template <typename E>
constexpr int kOneNan = std::is_same_v<E, BFloat16>     ? 0x7fc0
                        : std::is_same_v<E, Float8E4M3> ? 0x7f
                        : std::is_same_v<E, Float8E5M2> ? 0x7e
                                                        : 0;

// Whether a fold may give `a` where `b` is right.
template <typename E>
bool same(typename E::Bits a, typename E::Bits b) {
  if (std::memcmp(&a, &b, sizeof a) == 0) return true;
  if constexpr (std::is_floating_point_v<typename E::Value>) {
    return std::isnan(E::decode(b)) &&
           (kOneNan<E> != 0 ? a == kOneNan<E> : std::isnan(E::decode(a)));
  }
  return false;
}

// A byte that is false if it is 0.
struct Bool {
  using Bits = uint8_t;
  using Value = uint8_t;  // 0 or 1
  static Value decode(Bits bits) { return bits != 0 ? 1 : 0; }
  static Bits encode(Value value) { return value; }
};

template <typename V>
V combine(ReduceOp op, V a, V b) {
  if constexpr (std::is_integral_v<V>) {
    const auto x = static_cast<uint64_t>(a);
    const auto y = static_cast<uint64_t>(b);
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return static_cast<V>(x + y);
    if (op == ReduceOp::kProd) return static_cast<V>(x * y);
    if (op == ReduceOp::kAnd) return static_cast<V>(x & y);
    if (op == ReduceOp::kOr) return static_cast<V>(x | y);
    if (op == ReduceOp::kXor) return static_cast<V>(x ^ y);
    if (op == ReduceOp::kMin) return a < b ? a : b;
    return a > b ? a : b;
  } else {
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return a + b;
    if (op == ReduceOp::kProd) return a * b;
    if (op == ReduceOp::kMin) return a < b || std::isnan(a) ? a : b;
    return a > b || std::isnan(a) ? a : b;
  }
}

template <typename V>
V reduce_serial(ReduceOp op, const std::vector<V>& values) {
  V result = values[0];
  for (size_t k = 1; k < values.size(); ++k) result = combine(op, result, values[k]);
  return result;
}

template <typename V>
V reduce_tree(ReduceOp op, const std::vector<V>& values) {
  size_t leaves = 1;
  while (leaves * 2 <= values.size()) leaves *= 2;
  const size_t pairs = values.size() - leaves;
  std::vector<V> level;
  for (size_t j = 0; j < pairs; ++j) {
    level.push_back(combine(op, values[2 * j], values[2 * j + 1]));
  }
  for (size_t k = 2 * pairs; k < values.size(); ++k) level.push_back(values[k]);
  while (level.size() > 1) {
    std::vector<V> above;
    for (size_t j = 0; j < level.size(); j += 2) {
      above.push_back(combine(op, level[j], level[j + 1]));
    }
    level = above;
  }
  return level[0];
}

template <typename V>
V divide(V value, uint32_t n) {
  if constexpr (std::is_same_v<V, uint64_t>) {
    return value / n;
  } else if constexpr (std::is_integral_v<V>) {
    return static_cast<V>(static_cast<int64_t>(value) / static_cast<int64_t>(n));
  } else {
    return value / static_cast<V>(n);
  }
}

}  // namespace oracle
