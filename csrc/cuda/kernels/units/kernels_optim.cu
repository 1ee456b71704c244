// Kernels over flat vectors: the templates of optim_bodies.h with the device's policy.
#include "cuda/kernels/layout.h"
#include "cuda/optim/optim_bodies.h"

namespace pycoll::cuda {
namespace {

template <OptimKind K, typename T, typename G, typename C>
__global__ void __launch_bounds__(kPassThreads) step(const __grid_constant__ StepLaunch launch) {
  __shared__ Shared shared;  // not used, so it takes no room; likewise below
  step_span<K, T, G, C>(DevicePolicy(shared), launch, blockIdx.x);
}

template <typename T>
__global__ void __launch_bounds__(kPassThreads) unscale(const __grid_constant__ PassLaunch launch) {
  __shared__ Shared shared;
  unscale_span<T>(DevicePolicy(shared), launch, blockIdx.x);
}

template <typename T>
__global__ void __launch_bounds__(kPassThreads)
    nonfinite(const __grid_constant__ PassLaunch launch) {
  __shared__ Shared shared;
  nonfinite_span<T>(DevicePolicy(shared), launch, blockIdx.x);
}

template <typename T>
__global__ void __launch_bounds__(kSquareThreads<T>)
    squares(const __grid_constant__ PassLaunch launch) {
  __shared__ Shared shared;
  __shared__ int64_t columns[Limbs<T>::kCount * kSquareThreads<T>];
  squares_span<T>(DevicePolicy(shared), launch, blockIdx.x, columns);
}

}  // namespace
}  // namespace pycoll::cuda

#include "cuda/optim/optim_rows.inl"
