// The optimizer kernels for every CPU.
#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/optim/optim_kernels.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pycoll {
namespace base {
namespace {

constexpr int kWidth = 16;

#include "kernels/optim/optim_kernels.inl"

#if defined(__x86_64__)
template <>
inline Vec<float, 4> square_root<float, 4>(Vec<float, 4> v) {
  return _mm_sqrt_ps(v);
}

template <>
inline Vec<double, 2> square_root<double, 2>(Vec<double, 2> v) {
  return _mm_sqrt_pd(v);
}
#endif

constexpr OptimIsa kIsa = make_optim("base");

}  // namespace
}  // namespace base

const OptimIsa kOptimBase = base::kIsa;

}  // namespace pycoll
