// What the optimizer kernels of every machine have in common: for which types there are some, and
// scalars as the formulas take them.
#pragma once

#include "base/error.h"
#include "kernels/optim/optim.h"

namespace pycoll {

// Kinds of elements: f32, f16, bf16, f64.
inline constexpr int kOptimFloats = 4;
inline constexpr int kOptimDouble = 3;

// Pairs of gradient type and copy type: 3 * (f32, f16, bf16) + (none, f16, bf16), then float64.
inline constexpr int kOptimPairs = 10;

// Number of a kind of elements. Throws if the type is none of them.
inline int optim_float(DType type) {
  switch (type) {
    case DType::kFloat32:
      return 0;
    case DType::kFloat16:
      return 1;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat64:
      return kOptimDouble;
    default:
      throw_error("ArgumentError", "element type ", int(type), " is not a floating-point type");
  }
}

// Number of a pair; `copies`: there is a copy. Throws if there is no such step.
inline int optim_pair(const OptimTypes& types, bool copies) {
  const int grad = optim_float(types.grad);
  const int copy = copies ? optim_float(types.copy) : 0;
  const bool wide = types.state == DType::kFloat64;
  COLL_CHECK(wide ? grad == kOptimDouble && copy == 0
                  : types.state == DType::kFloat32 && grad < kOptimDouble && copy < kOptimDouble &&
                        (!copies || copy > 0),
             "ArgumentError", "no optimizer step for state type ", int(types.state),
             ", gradient type ", int(types.grad), " and copy type ", int(types.copy));
  return wide ? kOptimPairs - 1 : 3 * grad + copy;
}

// The scalars of a step, rounded to the state type.
template <typename T>
struct OptimScalars {
  T scale, keep, rate;
  T beta1, rest1;  // rest1 = 1 - beta1, and so on
  T beta2, rest2;
  T root, eps, decay;
};

template <typename T>
OptimScalars<T> round_scalars(const OptimArgs& a) {
  return {T(a.scale), T(a.keep),      T(a.rate), T(a.beta1), T(1 - a.beta1),
          T(a.beta2), T(1 - a.beta2), T(a.root), T(a.eps),   T(a.decay)};
}

}  // namespace pycoll
