// Passes over flat vectors as the host launches them: what their kernels take, and which there are.
// Without CUDA in it.
#pragma once

#include "cuda/host/pycoll_cuda.h"
#include "kernels/optim/optim_types.h"

namespace pycoll::cuda {

// How the threads of a launch share elements [0, count): `packs` packs begin at element `head`,
// where every vector is aligned to its packs; what lies before and behind goes one by one.
struct Span {
  uint64_t count, head, packs;
  uint32_t blocks, reserved;
};

// Parameters of an optimizer step.
struct StepLaunch {
  Span span;
  char* param;
  const char* grad;
  char* slots[2];
  char* copy;
  OptimScalars<float> single;  // of these two, those of the state type count
  OptimScalars<double> wide;
};

// Parameters of the other passes.
struct PassLaunch {
  Span span;
  const char* in;
  char* out;        // unscale only
  uint64_t* tally;  // counter of elements that are not finite; with squares behind the limbs
  double scale;     // unscale only
};

// Kernels by number of a kind of elements or a pair, as in csrc/kernels/optim/optim_types.h.
struct OptimKernels {
  const void* steps[kOptimKindCount][kOptimPairs];  // (StepLaunch)
  const void* unscale[kOptimFloats];                // (PassLaunch)
  const void* nonfinite[kOptimFloats];              // (PassLaunch)
  const void* squares[kOptimFloats];                // (PassLaunch)
};
extern const OptimKernels kOptimKernels;

// Threads of a block. Columns of limbs of float64 are long, and fit into less of its memory.
inline constexpr int kPassThreads = 256;
template <typename T>
inline constexpr int kSquareThreads = sizeof(T) == sizeof(double) ? 64 : kPassThreads;

void launch_step(const PycollCudaStep& step, void* stream);
void launch_unscale(int dtype, const void* in, void* out, uint64_t count, double scale,
                    uint64_t* odd, void* stream);
void launch_nonfinite(int dtype, const void* data, uint64_t count, uint64_t* odd, void* stream);
void launch_squares(int dtype, const void* data, uint64_t count, uint64_t* tally, void* stream);

}  // namespace pycoll::cuda
