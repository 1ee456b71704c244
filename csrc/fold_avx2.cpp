// The fold for x86-64 CPUs with AVX2 and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <utility>

#include "fold_kernels.h"

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

#include "fold_kernels.inl"

template <>
inline Vec<float, 8> load_half<8>(const char* p) {
  return _mm256_cvtph_ps(load_raw<__m128i>(p));
}

template <>
inline Vec<float, 4> load_half<4>(const char* p) {
  return _mm_cvtph_ps(_mm_cvtsi64_si128(load_raw<int64_t>(p)));
}

template <>
inline float load_half<1>(const char* p) {
  return _cvtsh_ss(load_raw<uint16_t>(p));
}

template <>
inline Vec<uint16_t, 8> pack_half<8>(Vec<float, 8> v) {
  return (Vec<uint16_t, 8>)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

template <>
inline Vec<uint16_t, 4> pack_half<4>(Vec<float, 4> v) {
  const __m128i packed = _mm_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  return (Vec<uint16_t, 4>)_mm_cvtsi128_si64(packed);
}

template <>
inline uint16_t pack_half<1>(float v) {
  return _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
}

// GCC 12 zero-extends the halves one by one.
template <>
inline Vec<uint32_t, 8> load_widened<8>(const char* p) {
  return (Vec<uint32_t, 8>)_mm256_cvtepu16_epi32(load_raw<__m128i>(p));
}

inline void stream_vector(char* dst, const char* src) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), load_raw<__m256i>(src));
}

constexpr FoldIsa kIsa = make_isa("avx2");

}  // namespace
}  // namespace avx2

const FoldIsa kFoldAvx2 = avx2::kIsa;

}  // namespace pycoll

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
