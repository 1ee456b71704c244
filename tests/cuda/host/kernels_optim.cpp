// Kernels over flat vectors on the host: the same templates with the host's policy.
#include "cuda/optim/optim_bodies.h"
#include "host_policy.h"

namespace pycoll::cuda {
namespace {

using host::HostPolicy;

template <OptimKind K, typename T, typename G, typename C>
void step(const HostPolicy& p, uint32_t block, const void* parameter) {
  step_span<K, T, G, C>(p, *static_cast<const StepLaunch*>(parameter), block);
}

template <typename T>
void unscale(const HostPolicy& p, uint32_t block, const void* parameter) {
  unscale_span<T>(p, *static_cast<const PassLaunch*>(parameter), block);
}

template <typename T>
void nonfinite(const HostPolicy& p, uint32_t block, const void* parameter) {
  nonfinite_span<T>(p, *static_cast<const PassLaunch*>(parameter), block);
}

template <typename T>
void squares(const HostPolicy& p, uint32_t block, const void* parameter) {
  squares_span<T>(p, *static_cast<const PassLaunch*>(parameter), block, p.columns());
}

}  // namespace
}  // namespace pycoll::cuda

#include "cuda/optim/optim_rows.inl"
