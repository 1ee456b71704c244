// Fused optimizer steps and checks over flat vectors: one pass over memory each.
//
// Results equal those of the same formulas evaluated operation by operation in the state type, to
// the bit, on every instruction set: no operation is fused, reordered or approximated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace pycoll {

// What one step works on. Vectors have `count` elements; none overlaps another.
struct OptimArgs {
  void* param;       // state type, updated
  const void* grad;  // gradient type
  void* slots[2];    // state type, updated: momentum; or first and second moment
  void* copy;        // the new parameter rounded to the copy type; null: no copy is wanted
  size_t count;
  double scale;  // of the gradient
  double keep;   // AdamW: 1 - learning rate * weight decay
  double rate;   // SGD: learning rate; AdamW: learning rate / (1 - beta1^t)
  double beta1;  // SGD: momentum
  double beta2;
  double root;  // 1 / sqrt(1 - beta2^t)
  double eps;
  double decay;  // SGD: weight decay
};

// State type: kFloat32 or kFloat64; with kFloat64 all types are that. Gradient type: kFloat16,
// kBFloat16 or kFloat32. Copy type: kFloat16 or kBFloat16, and only looked at if there is a copy.
struct OptimTypes {
  DType state;
  DType grad;
  DType copy;
};

enum class OptimKind : uint8_t { kAdamw = 0, kSgd = 1, kMomentum = 2, kNesterov = 3 };
inline constexpr int kOptimKindCount = 4;

// g = grad * scale, then, operation by operation and with scalars rounded to the state type first:
//   AdamW     p = p * keep;  m = m * beta1 + g * (1 - beta1);  v = v * beta2 + g * g * (1 - beta2);
//             p = p - rate * (m / (sqrt(v) * root + eps))
//   SGD       g = g + p * decay;  p = p - rate * g
//   momentum  g = g + p * decay;  b = b * beta1 + g;  p = p - rate * b
//   Nesterov  as before, but p = p - rate * (g + b * beta1)
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2;
// Sutskever et al., "On the importance of initialization and momentum", ICML 2013, section 2.
void optim_step(OptimKind kind, const OptimTypes& types, const OptimArgs& args);

// out = in * scale in float32 (float64 for float64); returns how many results are not finite.
size_t optim_unscale(DType type, const void* in, void* out, size_t count, double scale);

// Counts infinities and NaNs of a floating-point vector.
size_t optim_nonfinite(DType type, const void* data, size_t count);

// Fixed-point accumulator: limb i counts units of 2^(32 i - kExactBias). It holds every sum of
// squares of doubles exactly, so that the result does not depend on the order of additions, nor on
// how a vector is cut over ranks. Between calls limbs are in [0, 2^32) except the last.
inline constexpr int kExactLimbs = 70;
inline constexpr int kExactBias = 1152;

// Adds the square of each finite element, rounded to double (exact below float64); returns how many
// are not finite. float16, bfloat16, float32 or float64.
size_t optim_add_squares(DType type, const void* data, size_t count, int64_t* limbs);

}  // namespace pycoll
