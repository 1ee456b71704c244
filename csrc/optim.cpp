#include "optim.h"

#include <cstring>

#include "error.h"
#include "isa.h"
#include "optim_kernels.h"

namespace pycoll {
namespace {

#if defined(__x86_64__)
constinit Dispatch<OptimIsa> g_isa{&kOptimBase, &kOptimAvx2, &kOptimAvx512};
#else
constinit Dispatch<OptimIsa> g_isa{&kOptimBase};
#endif

// Index of a type among f32, f16, bf16, f64.
int type_index(DType type) {
  switch (type) {
    case DType::kFloat32:
      return 0;
    case DType::kFloat16:
      return 1;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat64:
      return 3;
    default:
      throw_error("ArgumentError", "element type ", int(type), " is not a floating-point type");
  }
}

constexpr int kDouble = 3;

// ---- exact sums of squares -------------------------------------------------------------------

constexpr uint64_t kLow = 0xffffffffu;

void propagate_carries(int64_t* limbs) {
  int64_t carry = 0;
  for (int i = 0; i < kExactLimbs - 1; ++i) {
    const int64_t sum = limbs[i] + carry;
    carry = sum >> 32;
    limbs[i] = sum & static_cast<int64_t>(kLow);
  }
  limbs[kExactLimbs - 1] += carry;
}

// Adds a finite double. Source: Neal, "Fast exact summation using small and large
// superaccumulators", arXiv 1505.05571, section 3.
inline void deposit(double value, int64_t* limbs) {
  const uint64_t bits = __builtin_bit_cast(uint64_t, value);
  const uint64_t exponent = (bits >> 52) & 2047;
  const uint64_t fraction = bits & ((uint64_t(1) << 52) - 1);
  const uint64_t mantissa = exponent == 0 ? fraction : fraction | (uint64_t(1) << 52);
  const uint64_t place = (exponent == 0 ? 1 : exponent) + (kExactBias - 1075);
  const uint64_t shift = place & 31;
  const int64_t sign = bits >> 63 ? -1 : 1;
  int64_t* const limb = limbs + (place >> 5);
  limb[0] += sign * static_cast<int64_t>((mantissa << shift) & kLow);
  limb[1] += sign * static_cast<int64_t>(mantissa >> (32 - shift));
}

// Up to kExtractCount elements.
template <typename T>
size_t add_block(const T* x, size_t count, int64_t* limbs, ExtractKernel extract) {
  double rest[kExtractCount];
  double sums[kExtractPasses];
  const int found = extract(x, count, rest, sums);
  size_t odd = 0;
  for (int i = 0; i < found && i < kExtractPasses; ++i) deposit(sums[i], limbs);
  if (found > kExtractPasses) {
    for (size_t i = 0; i < count; ++i) deposit(rest[i], limbs);
  } else if (found < 0) {
    for (size_t i = 0; i < count; ++i) {
      const double square = double(x[i]) * double(x[i]);
      if (square - square == 0) {
        deposit(square, limbs);
      } else {
        ++odd;
      }
    }
  }
  propagate_carries(limbs);
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
  const int grad = type_index(types.grad);
  const int copy = args.copy == nullptr ? 0 : type_index(types.copy);
  const bool wide = types.state == DType::kFloat64;
  COLL_CHECK(wide ? grad == kDouble && copy == 0
                  : types.state == DType::kFloat32 && grad < kDouble && copy < kDouble &&
                        (args.copy == nullptr || copy > 0),
             "ArgumentError", "no optimizer step for state type ", int(types.state),
             ", gradient type ", int(types.grad), " and copy type ", int(types.copy));
  const int pair = wide ? kOptimPairs - 1 : 3 * grad + copy;
  g_isa.current().steps[static_cast<int>(kind)][pair](args);
}

size_t optim_unscale(DType type, const void* in, void* out, size_t count, double scale) {
  return g_isa.current().unscale[type_index(type)](in, out, count, scale);
}

size_t optim_nonfinite(DType type, const void* data, size_t count) {
  switch (type_index(type)) {
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
  const int index = type_index(type);
  const ExtractKernel* const extract = g_isa.current().extract;
  if (index == 0) return add_squares(static_cast<const float*>(data), count, limbs, extract[0]);
  if (index == kDouble) {
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

const char* optim_isa() { return g_isa.current().name; }

bool optim_force_isa(const char* name) { return g_isa.force(name); }

}  // namespace pycoll
