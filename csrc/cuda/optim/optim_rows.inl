// The table of optim_launch.h. Whoever includes this has defined, in pycoll::cuda and an anonymous
// namespace, the kernels step<K, T, G, C>, unscale<T>, nonfinite<T> and squares<T>.
#include "cuda/optim/optim_bodies.h"

namespace pycoll::cuda {
namespace {

template <typename Kernel>
const void* address(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

template <OptimKind K>
void fill_steps(const void** row) {
  const void* const kernels[kOptimPairs] = {
      address(&step<K, float, float, NoCopy>),  address(&step<K, float, float, Half>),
      address(&step<K, float, float, BFloat>),  address(&step<K, float, Half, NoCopy>),
      address(&step<K, float, Half, Half>),     address(&step<K, float, Half, BFloat>),
      address(&step<K, float, BFloat, NoCopy>), address(&step<K, float, BFloat, Half>),
      address(&step<K, float, BFloat, BFloat>), address(&step<K, double, double, NoCopy>)};
  for (int i = 0; i < kOptimPairs; ++i) row[i] = kernels[i];
}

OptimKernels make_optim_kernels() {
  OptimKernels made{{},
                    {address(&unscale<float>), address(&unscale<Half>), address(&unscale<BFloat>),
                     address(&unscale<double>)},
                    {address(&nonfinite<float>), address(&nonfinite<Half>),
                     address(&nonfinite<BFloat>), address(&nonfinite<double>)},
                    {address(&squares<float>), address(&squares<Half>), address(&squares<BFloat>),
                     address(&squares<double>)}};
  fill_steps<OptimKind::kAdamw>(made.steps[0]);
  fill_steps<OptimKind::kSgd>(made.steps[1]);
  fill_steps<OptimKind::kMomentum>(made.steps[2]);
  fill_steps<OptimKind::kNesterov>(made.steps[3]);
  return made;
}

}  // namespace

const OptimKernels kOptimKernels = make_optim_kernels();

}  // namespace pycoll::cuda
