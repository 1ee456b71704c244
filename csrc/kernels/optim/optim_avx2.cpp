// The optimizer kernels for x86-64 CPUs with AVX2 and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/optim/optim_kernels.h"

// After the headers, so that their inline functions stay baseline code.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

namespace pycoll {
namespace avx2 {
namespace {

constexpr int kWidth = 32;

#include "kernels/optim/optim_kernels.inl"

template <>
inline Vec<float, 8> load_half<8>(const char* p) {
  return _mm256_cvtph_ps(load_raw<__m128i>(p));
}

template <>
inline Vec<uint16_t, 8> pack_half<8>(Vec<float, 8> v) {
  return (Vec<uint16_t, 8>)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

template <>
inline Vec<float, 8> square_root<float, 8>(Vec<float, 8> v) {
  return _mm256_sqrt_ps(v);
}

template <>
inline Vec<double, 4> square_root<double, 4>(Vec<double, 4> v) {
  return _mm256_sqrt_pd(v);
}

constexpr OptimIsa kIsa = make_optim("avx2");

}  // namespace
}  // namespace avx2

const OptimIsa kOptimAvx2 = avx2::kIsa;

}  // namespace pycoll

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
