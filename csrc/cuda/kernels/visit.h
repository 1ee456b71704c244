// Which (dtype, operation) is folded by which instantiation; the choices of fold_kernels.inl:
// signedness matters to min and max only (avg divides by a number that carries it), and the size
// of elements does not matter to bitwise operations. Floats of 8 bits are only added: they take
// long to compile, and nobody asks for their largest element.
#pragma once

#include <tuple>

#include "cuda/kernels/elements.h"

namespace pycoll::cuda {

using Elements =
    std::tuple<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, Half,
               BFloat, float, double, Truth, Float8E4M3, Float8E5M2>;  // by DType
static_assert(std::tuple_size_v<Elements> == kDTypeCount);

constexpr bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
}

template <typename T, bool kInteger = std::is_integral_v<T>>
struct UnsignedOf {
  using type = std::make_unsigned_t<T>;
};
template <typename T>
struct UnsignedOf<T, false> {
  using type = T;
};

// The element type with which kOp is instantiated for dtype D; void where it is not defined.
template <DType D, ReduceOp kOp>
struct Canonical {
  using T = std::tuple_element_t<static_cast<size_t>(D), Elements>;
  static constexpr bool kOrdered = kOp == ReduceOp::kMin || kOp == ReduceOp::kMax;
  // Of truth values, min is and, max is or: see kernels_for.
  using Bitwise = std::conditional_t<D == DType::kBool, Truth,
                                     std::conditional_t<std::is_integral_v<T>, Bits, void>>;
  static constexpr bool kMissing = D == DType::kBool || (kIs8BitFloat<T> && kOp != ReduceOp::kSum);
  using Arithmetic =
      std::conditional_t<kMissing, void,
                         std::conditional_t<kOrdered, T, typename UnsignedOf<T>::type>>;
  using type = std::conditional_t<is_bitwise(kOp), Bitwise, Arithmetic>;
};

// Types for which kOp has kernels of its own for plans that are one fold.
template <typename T, ReduceOp kOp>
inline constexpr bool kHasDirect =
    kOp == ReduceOp::kSum &&
    ((kIsNarrowFloat<T> && sizeof(T) == 2) || std::is_floating_point_v<T> ||
     std::is_same_v<T, uint32_t> || std::is_same_v<T, uint64_t>);

}  // namespace pycoll::cuda
