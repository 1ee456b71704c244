// The kernels of one operation, as the host sees them. Filled by kernels.inl, one translation unit
// for each operation, so that they compile side by side.
#pragma once

#include "base/types.h"
#include "cuda/kernels/layout.h"

namespace pycoll::cuda {

inline constexpr int kMaxThreads = 512;  // of a block

// Parameters of one fold on its own.
struct FoldLaunch {
  const char* src[kMaxRanks];
  char* dst[kMaxRanks];
  uint32_t nsrc, ndst;
  uint32_t tree, scale_n, is_signed;
  uint64_t nbytes;  // of every piece
  uint64_t slice;   // bytes of a block
};

// Parameters of sums over ranks + residual + RMSNorm; see rms_norm.h. `call` has the inputs and the
// normalised rows in `in` and `out`; its numbers of plans are not used.
struct NormLaunch {
  Launch call;
  const char* residual[kMaxRanks];  // by rank; null: none is added
  char* residual_out[kMaxRanks];    // likewise: nobody wants the sum
  const char* weight;               // [hidden]
  uint64_t rows, hidden;
  float eps;
  uint32_t vectors;  // every row of every array begins at a multiple of 16 bytes
};

// Kernels as cudaLaunchKernel takes them; null where there is none.
struct KernelSet {
  const void* interpret;  // (Launch)
  const void* direct;     // (Launch)
  const void* packets;    // (Launch)
  const void* fold;       // (FoldLaunch)
  int elem_bytes;         // of the fold's elements
};

// By DType.
using KernelRow = const KernelSet[kDTypeCount];
extern KernelRow kSumKernels, kProdKernels, kMinKernels, kMaxKernels;
extern KernelRow kAndKernels, kOrKernels, kXorKernels;
extern const KernelSet kMoveKernels;  // plans that only move: any type
extern const void* const kEmptyKernel;
extern const void* const kGateKernel;  // (Launch), one block of kGateThreads
inline constexpr int kGateThreads = 64;

// (Launch): sums of plans that are two shots by pushing, over a multicast address, for float16,
// bfloat16 and float32; blocks pushed to all ranks. Only devices with multicast can load them.
inline constexpr int kMulticastTypes = 3;
inline constexpr DType kFirstMulticastType = DType::kFloat16;
extern const void* const kMulticastKernels[kMulticastTypes];
extern const void* const kMulticastCopies;

// Of float32, float16 and bfloat16: (NormLaunch)
inline constexpr int kNormTypes = 3;
extern const void* const kNormKernels[kNormTypes];

}  // namespace pycoll::cuda
