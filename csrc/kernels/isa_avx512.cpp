// The kernels for x86-64 CPUs with AVX-512 (F, BW, VL, DQ).
#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/isa.h"

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

#include "kernels/fold/fold_kernels.inl"
#include "kernels/fold/half_f16c.inl"
#include "kernels/optim/optim_kernels.inl"

template <>
inline Vec<float, 16> load_half<16>(const char* p) {
  // The unmasked form makes GCC 12 warn of an uninitialised operand that it does not use.
  return _mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(p));
}

template <>
inline Vec<uint16_t, 16> pack_half<16>(Vec<float, 16> v) {
  return (Vec<uint16_t, 16>)_mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
}

// GCC 12 zero-extends the halves one by one.
template <>
inline Vec<uint32_t, 16> load_widened<16>(const char* p) {
  return (Vec<uint32_t, 16>)_mm512_maskz_cvtepu16_epi32(0xffff, load_raw<__m256i>(p));
}

template <>
inline Vec<int16_t, 16> load_signed_bytes<16>(const char* p) {
  return (Vec<int16_t, 16>)_mm256_cvtepi8_epi16(load_raw<__m128i>(p));
}

inline void stream_vector(char* dst, const char* src) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), load_raw<__m512i>(src));
}

constexpr Kernels kKernels = make_kernels("avx512");

}  // namespace
}  // namespace avx512

const Kernels kAvx512Kernels = avx512::kKernels;

}  // namespace pycoll

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
