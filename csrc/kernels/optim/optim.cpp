#include "kernels/optim/optim.h"

#include <cstring>

#include "kernels/isa.h"
#include "kernels/optim/exact_sum.h"

namespace pycoll {
namespace {

// ---- exact sums of squares -------------------------------------------------------------------

// Adds a finite double.
inline void add_value(double value, int64_t* limbs) {
  deposit(magnitude_of(value), value < 0 ? -1 : 1, limbs, 1);
}

// Up to kExtractCount elements.
template <typename T>
size_t add_block(const T* x, size_t count, int64_t* limbs, ExtractKernel extract) {
  double rest[kExtractCount];
  double sums[kExtractPasses];
  const int found = extract(x, count, rest, sums);
  size_t odd = 0;
  for (int i = 0; i < found && i < kExtractPasses; ++i) add_value(sums[i], limbs);
  if (found > kExtractPasses) {
    for (size_t i = 0; i < count; ++i) add_value(rest[i], limbs);
  } else if (found < 0) {
    for (size_t i = 0; i < count; ++i) {
      const double square = double(x[i]) * double(x[i]);
      if (square - square == 0) {
        add_value(square, limbs);
      } else {
        ++odd;
      }
    }
  }
  propagate_carries(limbs, kExactLimbs, 1);
  return odd;
}

template <typename T>
size_t add_squares(const T* x, size_t count, int64_t* limbs, ExtractKernel extract) {
  size_t odd = 0;
  for (size_t i = 0; i < count; i += kExtractCount) {
    odd += add_block(x + i, count - i < kExtractCount ? count - i : kExtractCount, limbs, extract);
  }
  return odd;
}

template <typename Word>
size_t count_ones(const void* data, size_t count, Word exponent) {
  const auto* words = static_cast<const Word*>(data);
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) found += (words[i] & exponent) == exponent;
  return found;
}

}  // namespace

void optim_step(OptimKind kind, const OptimTypes& types, const OptimArgs& args) {
  const int pair = optim_pair(types, args.copy != nullptr);
  kernels().steps[static_cast<int>(kind)][pair](args);
}

size_t optim_unscale(DType type, const void* in, void* out, size_t count, double scale) {
  return kernels().unscale[optim_float(type)](in, out, count, scale);
}

size_t optim_nonfinite(DType type, const void* data, size_t count) {
  switch (optim_float(type)) {
    case 0:
      return count_ones<uint32_t>(data, count, 0x7f800000u);
    case 1:
      return count_ones<uint16_t>(data, count, 0x7c00u);
    case 2:
      return count_ones<uint16_t>(data, count, 0x7f80u);
    default:
      return count_ones<uint64_t>(data, count, 0x7ff0000000000000u);
  }
}

size_t optim_add_squares(DType type, const void* data, size_t count, int64_t* limbs) {
  const int index = optim_float(type);
  const ExtractKernel* const extract = kernels().extract;
  if (index == 0) return add_squares(static_cast<const float*>(data), count, limbs, extract[0]);
  if (index == kOptimDouble) {
    return add_squares(static_cast<const double*>(data), count, limbs, extract[1]);
  }
  // 16-bit types in blocks, through float32, which holds them exactly
  constexpr size_t kBlock = 1024;
  float block[kBlock];
  const auto* x = static_cast<const char*>(data);
  size_t odd = 0;
  for (size_t i = 0; i < count; i += kBlock) {
    const size_t n = count - i < kBlock ? count - i : kBlock;
    optim_unscale(type, x + 2 * i, block, n, 1.0);
    odd += optim_add_squares(DType::kFloat32, block, n, limbs);
  }
  return odd;
}

}  // namespace pycoll
