// What one instruction set offers to optim.cpp: a table of kernels, filled by optim_kernels.inl.
#pragma once

#include "kernels/optim/optim_types.h"

namespace pycoll {

using OptimKernel = void (*)(const OptimArgs& args);
using UnscaleKernel = size_t (*)(const void* in, void* out, size_t count, double scale);

// Splits the squares of up to kExtractCount elements into sums that are exact: the sum of all
// squares is that of the first `returned` entries of `sums`, plus that of `rest` if kExtractPasses
// + 1 is returned. Returns -1 if an element is not finite or out of the range in which this works.
// `rest` has room for kExtractCount doubles.
// Source: Rump, Ogita and Oishi, "Accurate floating-point summation part I", SIAM J. Sci. Comput.
// 31(1), 2008, algorithm 3.2 (ExtractVector).
using ExtractKernel = int (*)(const void* data, size_t count, double* rest, double* sums);
inline constexpr size_t kExtractCount = 512;
inline constexpr int kExtractPasses = 3;

struct OptimIsa {
  const char* name;
  OptimKernel steps[kOptimKindCount][kOptimPairs];
  UnscaleKernel unscale[kOptimFloats];  // f32, f16, bf16, f64
  ExtractKernel extract[2];             // f32, f64
};

extern const OptimIsa kOptimBase;
#if defined(__x86_64__)
extern const OptimIsa kOptimAvx2;
extern const OptimIsa kOptimAvx512;
#endif

}  // namespace pycoll
