// The optimizer kernels for x86-64 CPUs with AVX-512 (F, BW, VL, DQ).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/optim/optim_kernels.h"

// After the headers, so that their inline functions stay baseline code.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")
#endif

namespace pycoll {
namespace avx512 {
namespace {

constexpr int kWidth = 64;

#include "kernels/optim/optim_kernels.inl"

template <>
inline Vec<float, 16> load_half<16>(const char* p) {
  return _mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(p));
}

template <>
inline Vec<uint16_t, 16> pack_half<16>(Vec<float, 16> v) {
  return (Vec<uint16_t, 16>)_mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
}

template <>
inline Vec<float, 16> square_root<float, 16>(Vec<float, 16> v) {
  return _mm512_maskz_sqrt_ps(0xffff, v);
}

template <>
inline Vec<double, 8> square_root<double, 8>(Vec<double, 8> v) {
  return _mm512_maskz_sqrt_pd(0xff, v);
}

constexpr OptimIsa kIsa = make_optim("avx512");

}  // namespace
}  // namespace avx512

const OptimIsa kOptimAvx512 = avx512::kIsa;

}  // namespace pycoll

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
