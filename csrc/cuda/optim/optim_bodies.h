// Passes over flat vectors of one device: optimizer steps, unscaling, counts and exact sums of
// squares. The contract of csrc/kernels/optim/optim.h and, operation by operation, its formulas.
//
// They are bound by memory. Neighbouring threads take neighbouring packs, of as many elements as 16
// bytes hold of the widest type, so that every warp reads and writes whole lines; an element is
// read and written by one thread.
#pragma once

#include <cmath>

#include "cuda/kernels/elements.h"
#include "cuda/optim/optim_launch.h"
#include "kernels/optim/exact_sum.h"

namespace pycoll::cuda {

template <typename T, int N>
PYCOLL_BOTH T square_root(T value) {
  return std::sqrt(value);  // IEEE: -prec-sqrt=true is the default
}

#define PYCOLL_FORMULA PYCOLL_BOTH
#include "kernels/optim/optim_formulas.inl"

// Visits this thread's share: visit<kPack>(i) for packs that begin at element i, visit<1>(i) for
// elements that lie in none. kReads: nothing is written, so several packs are loaded at once.
template <int kPack, bool kReads = false, typename P, typename Visit>
PYCOLL_DEVICE void for_each_pack(const P& p, const Span& span, uint32_t block, Visit visit) {
  const uint64_t thread = uint64_t{block} * p.threads() + p.tid();
  const uint64_t threads = uint64_t{span.blocks} * p.threads();
  const uint64_t packed = kPack * span.packs;
  const auto pack = [&](uint64_t i) { visit.template operator()<kPack>(span.head + kPack * i); };
  if constexpr (kReads) {
    PYCOLL_UNROLL_4
    for (uint64_t i = thread; i < span.packs; i += threads) pack(i);
  } else {
    PYCOLL_ROLLED
    for (uint64_t i = thread; i < span.packs; i += threads) pack(i);
  }
  PYCOLL_ROLLED
  for (uint64_t i = thread; i < span.count - packed; i += threads) {
    visit.template operator()<1>(i < span.head ? i : i + packed);
  }
}

// kCount elements of a vector, from element i on.
template <typename T, int kCount, typename P>
PYCOLL_DEVICE Values<Acc<T>, kCount> read(const P& p, const char* vector, uint64_t i) {
  constexpr int kBytes = kCount * sizeof(T);
  return Lanes<P, T, kBytes>::decode(p, p.template load<kBytes>(vector + i * sizeof(T)));
}
template <typename T, int kCount, typename P>
PYCOLL_DEVICE void write(const P& p, char* vector, uint64_t i,
                         const Values<Acc<T>, kCount>& values) {
  constexpr int kBytes = kCount * sizeof(T);
  p.store(vector + i * sizeof(T), Lanes<P, T, kBytes>::encode(p, values));
}

// Whether a value is neither infinite nor a NaN.
template <typename V>
PYCOLL_DEVICE bool is_finite(V value) {
  return value - value == 0;
}

// ---- optimizer steps ---------------------------------------------------------------------------

struct NoCopy {};

template <OptimKind K, typename T, typename G, typename C, typename P>
PYCOLL_DEVICE void step_span(const P& p, const StepLaunch& a, uint32_t block) {
  const OptimScalars<T>* scalars;
  if constexpr (sizeof(T) == sizeof(float)) {
    scalars = &a.single;
  } else {
    scalars = &a.wide;
  }
  for_each_pack<16 / sizeof(T)>(p, a.span, block, [&]<int kCount>(uint64_t i) {
    const auto grad = read<G, kCount>(p, a.grad, i);
    auto param = read<T, kCount>(p, a.param, i);
    Values<T, kCount> first{}, second{};
    if constexpr (K != OptimKind::kSgd) first = read<T, kCount>(p, a.slots[0], i);
    if constexpr (K == OptimKind::kAdamw) second = read<T, kCount>(p, a.slots[1], i);
    PYCOLL_UNROLL
    for (int k = 0; k < kCount; ++k) {
      step_values<K, 1>(*scalars, grad.v[k], param.v[k], first.v[k], second.v[k]);
    }
    if constexpr (K != OptimKind::kSgd) write<T>(p, a.slots[0], i, first);
    if constexpr (K == OptimKind::kAdamw) write<T>(p, a.slots[1], i, second);
    write<T>(p, a.param, i, param);
    if constexpr (!std::is_same_v<C, NoCopy>) write<C>(p, a.copy, i, param);
  });
}

// ---- unscaling and counts ----------------------------------------------------------------------

// Of few threads there is anything to tell.
template <typename P>
PYCOLL_DEVICE void report(const P& p, uint64_t* counter, uint64_t odd) {
  if (odd != 0) p.count(counter, odd);
}

template <typename T, typename P>
PYCOLL_DEVICE void unscale_span(const P& p, const PassLaunch& a, uint32_t block) {
  using V = Acc<T>;
  const V scale = static_cast<V>(a.scale);
  uint64_t odd = 0;
  for_each_pack<16 / sizeof(V)>(p, a.span, block, [&]<int kCount>(uint64_t i) {
    auto values = read<T, kCount>(p, a.in, i);
    PYCOLL_UNROLL
    for (int k = 0; k < kCount; ++k) {
      values.v[k] = values.v[k] * scale;
      odd += !is_finite(values.v[k]);
    }
    write<V>(p, a.out, i, values);
  });
  report(p, a.tally, odd);
}

// Infinities and NaNs have all bits of the exponent set.
template <typename T>
struct Exponent {
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static constexpr Word kBits = sizeof(T) == 4 ? 0x7f800000u : 0x7ff0000000000000u;
};
template <>
struct Exponent<Half> {
  using Word = uint16_t;
  static constexpr Word kBits = 0x7c00u;
};
template <>
struct Exponent<BFloat> {
  using Word = uint16_t;
  static constexpr Word kBits = 0x7f80u;
};

template <typename T, typename P>
PYCOLL_DEVICE void nonfinite_span(const P& p, const PassLaunch& a, uint32_t block) {
  using E = Exponent<T>;
  uint64_t odd = 0;
  for_each_pack<16 / sizeof(T), true>(p, a.span, block, [&]<int kCount>(uint64_t i) {
    const auto words = read<typename E::Word, kCount>(p, a.in, i);
    uint32_t found = 0;
    PYCOLL_UNROLL
    for (int k = 0; k < kCount; ++k) found += (words.v[k] & E::kBits) == E::kBits;
    odd += found;
  });
  report(p, a.tally, odd);
}

// ---- exact sums of squares ---------------------------------------------------------------------

// Squares of floats, and of what becomes a float, reach few of the limbs: from 2^-298, in limb 26,
// to 2^256, where the last limb of a column begins. Carries are propagated every kDeposits
// deposits, a half of what limbs have room for.
template <typename T>
struct Limbs {
  static constexpr bool kWide = sizeof(T) == sizeof(double);
  static constexpr int kFirst = kWide ? 0 : 26;
  static constexpr int kCount = kWide ? kExactLimbs : 19;
  static constexpr uint32_t kDeposits = 1u << 9;
};

// The square, rounded to double where it does not fit. Places are relative to limb kFirst.
PYCOLL_DEVICE FixedPoint square_of(double value) { return magnitude_of(value * value); }
PYCOLL_DEVICE FixedPoint square_of(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t exponent = (bits >> 23) & 255u;
  const uint32_t fraction = bits & 0x7fffffu;
  const uint64_t mantissa = exponent == 0 ? fraction : fraction | 0x800000u;
  constexpr uint32_t kPlace = kExactBias - 300 - 32 * Limbs<float>::kFirst;
  return {mantissa * mantissa, 2 * (exponent == 0 ? 1u : exponent) + kPlace};
}

PYCOLL_DEVICE bool has_square(float value) { return is_finite(value); }
PYCOLL_DEVICE bool has_square(double value) { return is_finite(value * value); }

// Every thread has a column of limbs of its own: limb i of thread t is columns[i * threads + t], in
// memory of the block, where neighbours do not get into each other's way. In the end the block adds
// the columns and puts the sums into `tally`. They are integers, so no order matters.
template <typename T, typename P>
PYCOLL_DEVICE void squares_span(const P& p, const PassLaunch& a, uint32_t block, int64_t* columns) {
  using L = Limbs<T>;
  const uint32_t threads = p.threads();
  int64_t* const column = columns + p.tid();
  for (int i = 0; i < L::kCount; ++i) column[i * threads] = 0;
  uint32_t deposits = 0;
  uint64_t odd = 0;
  for_each_pack<16 / sizeof(T)>(p, a.span, block, [&]<int kCount>(uint64_t i) {
    const auto values = read<T, kCount>(p, a.in, i);
    PYCOLL_UNROLL
    for (int k = 0; k < kCount; ++k) {
      const bool fine = has_square(values.v[k]);
      if (fine) deposit(square_of(values.v[k]), 1, column, threads);
      odd += !fine;
    }
    deposits += kCount;
    if (deposits >= L::kDeposits) {
      propagate_carries(column, L::kCount, threads);
      deposits = 0;
    }
  });
  propagate_carries(column, L::kCount, threads);
  p.barrier();
  for (uint32_t i = p.tid(); i < uint32_t{L::kCount}; i += threads) {
    uint64_t sum = 0;
    uint32_t other = i % threads;  // each thread begins elsewhere: they read from different banks
    for (uint32_t k = 0; k < threads; ++k) {
      sum += static_cast<uint64_t>(columns[i * threads + other]);
      other = other + 1 == threads ? 0 : other + 1;
    }
    if (sum != 0) p.count(a.tally + L::kFirst + i, sum);
  }
  report(p, a.tally + kExactLimbs, odd);
}

}  // namespace pycoll::cuda
