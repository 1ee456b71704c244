// The kernels of one instruction set as a table, and which table this process uses: that of the
// widest instruction set that its CPU has.
//
// isa_base.cpp, isa_avx2.cpp and isa_avx512.cpp compile the same files for each instruction
// set: fold/fold_kernels.inl, routes/routes_kernels.inl and optim/optim_kernels.inl. Read
// fold/fold.h first.
#pragma once

#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/fold/fold.h"
#include "kernels/optim/optim_types.h"

namespace pycoll {

// Folds the bytes [src_offset, src_offset + nbytes) of every source and stores the result from byte
// dst_offset of every destination on. nsrc, ndst >= 1; offsets and nbytes are multiples of the
// itemsize. Of element i all sources are read before its result is stored, so element i of a
// destination may be element i of a source.
struct FoldArgs {
  const char* const* srcs;
  char* const* dsts;
  int nsrc;
  int ndst;
  size_t src_offset;
  size_t dst_offset;
  size_t nbytes;
  uint32_t scale_n;  // kAvg only, and not 0
};

using FoldKernel = void (*)(const FoldArgs& args);

// out[i] = (weights[0] * rows[0][i] + weights[1] * rows[1][i]) + ... of `count` elements and k >= 1
// rows, in the accumulation type, which weights have, rounded once; see routes/routes.h.
using WeighKernel = void (*)(const char* const* rows, const void* weights, size_t k, char* out,
                             size_t count);

enum FoldShape { kShapeSerial = 0, kShapeTree = 1 };

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

struct Kernels {
  const char* name;
  // Operations that a dtype lacks have a kernel that aborts.
  FoldKernel fold[2][kDTypeCount][kReduceOpCount];
  // Copies with non-temporal stores where the alignment allows; the caller fences.
  void (*stream)(char* dst, const char* src, size_t nbytes);
  OptimKernel steps[kOptimKindCount][kOptimPairs];
  UnscaleKernel unscale[kOptimFloats];  // f32, f16, bf16, f64
  ExtractKernel extract[2];             // f32, f64
  WeighKernel weigh[kOptimFloats];      // f32, f16, bf16, f64
};

// Weak: a build for the processor of one machine has one of them only (PYCOLL_ISA in setup.py).
[[gnu::weak]] extern const Kernels kBaseKernels;
#if defined(__x86_64__)
[[gnu::weak]] extern const Kernels kAvx2Kernels;
[[gnu::weak]] extern const Kernels kAvx512Kernels;
#endif

// The table in use. Thread-safe.
const Kernels& kernels();

}  // namespace pycoll
