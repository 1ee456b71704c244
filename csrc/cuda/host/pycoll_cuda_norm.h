// C interface of libpycoll_cuda.so, continued: sums over ranks + residual + RMSNorm of rows.
#pragma once

#include "cuda/host/pycoll_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Arrays of all ranks, by rank: device pointers, read before the launch returns, multiples of the
// itemsize. Vectors of 16 bytes are used where all of them are multiples of 16, and `hidden` is one
// of 8. Nothing that is written may overlap another array, of any rank, but that residual_out[r]
// may be residual[r] and, with `push`, out[r] inputs[r].
typedef struct {
  const void* const* inputs;    // [rows, hidden] each
  const void* const* residual;  // likewise, the same contents on all ranks; null: none is added
  void* const* out;             // y
  void* const* residual_out;    // h; null: nobody wants it
  const void* weight;           // [hidden], for all ranks
  uint64_t rows;
  uint64_t hidden;  // elements of a row, at least 1
  float eps;        // added to the mean square
  int32_t dtype;    // float32, float16 or bfloat16, of every array
  int32_t tree;     // ranks are added along the in-order tree; 0: left to right
  int32_t push;     // two shots: a rank makes a share of the rows for everybody; 0: all, for itself
} PycollCudaNorm;

// s = sum of `inputs` over ranks, h = s + residual, each rounded to the type; y = h / sqrt(mean(h *
// h) + eps) * weight in float32, rounded; csrc/cuda/kernels/rms_norm.h has the order of every sum.
// One cooperative launch of a virtual group, a call of it like those of pycoll_cuda_launch, which
// has the other arguments and the errors.
PYCOLL_CUDA_API int pycoll_cuda_rms_norm(PycollCudaGroup* group, const PycollCudaNorm* norm,
                                         int nblocks, int nthreads, uint64_t timeout_ns,
                                         uint64_t absent, void* stream);

#ifdef __cplusplus
}
#endif
