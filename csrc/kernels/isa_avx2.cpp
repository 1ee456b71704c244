// The kernels for x86-64 CPUs with AVX2 and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/isa.h"

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

#include "kernels/fold/fold_kernels.inl"
#include "kernels/fold/half_f16c.inl"
#include "kernels/optim/optim_kernels.inl"

template <>
inline Vec<float, 8> load_half<8>(const char* p) {
  return _mm256_cvtph_ps(load_raw<__m128i>(p));
}

template <>
inline Vec<uint16_t, 8> pack_half<8>(Vec<float, 8> v) {
  return (Vec<uint16_t, 8>)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

// GCC 12 zero-extends the halves one by one.
template <>
inline Vec<uint32_t, 8> load_widened<8>(const char* p) {
  return (Vec<uint32_t, 8>)_mm256_cvtepu16_epi32(load_raw<__m128i>(p));
}

template <>
inline Vec<int16_t, 8> load_signed_bytes<8>(const char* p) {
  return (Vec<int16_t, 8>)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// In 16-bit lanes: 11 instructions for 15. Half a place is added to all; a carry that leaves
// nothing below it came of a tie, which goes to the even neighbour. A NaN is told from its upper
// half: the lower one is zero where sources are bfloat16, so that nothing is carried into the
// upper.
template <>
inline Vec<uint32_t, 8> pack_bfloats<8>(Vec<float, 8> low, Vec<float, 8> high) {
  constexpr int kOdd = 0xaa;
  const __m256i half_place = _mm256_set1_epi32(0x8000);
  const __m256i l = _mm256_add_epi32(_mm256_castps_si256(low), half_place);
  const __m256i h = _mm256_add_epi32(_mm256_castps_si256(high), half_place);
  const __m256i upper = _mm256_blend_epi16(_mm256_srli_epi32(l, 16), h, kOdd);
  const __m256i below = _mm256_blend_epi16(l, _mm256_slli_epi32(h, 16), kOdd);
  const __m256i even = _mm256_set1_epi16(static_cast<short>(0xfffe));
  const __m256i rounded = _mm256_and_si256(upper, _mm256_adds_epu16(below, even));
  const __m256i magnitude = _mm256_and_si256(rounded, _mm256_set1_epi16(0x7fff));
  const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7f80));
  return (Vec<uint32_t, 8>)_mm256_blendv_epi8(rounded, _mm256_set1_epi16(0x7fc0), nan);
}

inline void stream_vector(char* dst, const char* src) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), load_raw<__m256i>(src));
}

constexpr Kernels kKernels = make_kernels("avx2");

}  // namespace
}  // namespace avx2

const Kernels kAvx2Kernels = avx2::kKernels;

}  // namespace pycoll

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
