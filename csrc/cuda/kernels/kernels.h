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

// Kernels as cudaLaunchKernel takes them; null where there is none.
struct KernelSet {
  const void* interpret;  // (Launch)
  const void* direct;     // (Launch)
  const void* fold;       // (FoldLaunch)
  int elem_bytes;         // of the fold's elements
};

// By DType.
using KernelRow = const KernelSet[kDTypeCount];
extern KernelRow kSumKernels, kProdKernels, kMinKernels, kMaxKernels;
extern KernelRow kAndKernels, kOrKernels, kXorKernels;
extern const KernelSet kMoveKernels;  // plans that only move: any type
extern const void* const kEmptyKernel;

// (Launch): sums of plans that are two shots by pushing, over a multicast address; for float16,
// bfloat16 and float32. Only devices with multicast can load them.
inline constexpr int kMulticastTypes = 3;
inline constexpr DType kFirstMulticastType = DType::kFloat16;
extern const void* const kMulticastKernels[kMulticastTypes];

}  // namespace pycoll::cuda
