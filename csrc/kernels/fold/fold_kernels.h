// What one instruction set offers to fold.cpp: a table of kernels, filled by fold_kernels.inl.
#pragma once

#include "kernels/fold/fold.h"

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

enum FoldShape { kShapeSerial = 0, kShapeTree = 1 };

struct FoldIsa {
  const char* name;
  // Operations that a dtype lacks have a kernel that aborts.
  FoldKernel kernels[2][kDTypeCount][kReduceOpCount];
  // Copies with non-temporal stores where the alignment allows; the caller fences.
  void (*stream)(char* dst, const char* src, size_t nbytes);
};

extern const FoldIsa kFoldBase;
#if defined(__x86_64__)
extern const FoldIsa kFoldAvx2;
extern const FoldIsa kFoldAvx512;
#endif

}  // namespace pycoll
