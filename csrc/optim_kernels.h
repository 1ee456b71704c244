// What one instruction set offers to optim.cpp: a table of kernels, filled by optim_kernels.inl.
#pragma once

#include "optim.h"

namespace pycoll {

using OptimKernel = void (*)(const OptimArgs& args);
using UnscaleKernel = size_t (*)(const void* in, void* out, size_t count, double scale);

// Pairs of gradient type and copy type: 3 * (f32, f16, bf16) + (none, f16, bf16), then float64.
inline constexpr int kOptimPairs = 10;

struct OptimIsa {
  const char* name;
  OptimKernel steps[kOptimKindCount][kOptimPairs];
  UnscaleKernel unscale[4];  // f32, f16, bf16, f64
};

extern const OptimIsa kOptimBase;
#if defined(__x86_64__)
extern const OptimIsa kOptimAvx2;
extern const OptimIsa kOptimAvx512;
#endif

}  // namespace pycoll
