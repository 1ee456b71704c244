// Half precision in narrow vectors, by the instructions of F16C.
template <>
inline Vec<float, 4> load_half<4>(const char* p) {
  return _mm_cvtph_ps(_mm_cvtsi64_si128(load_raw<int64_t>(p)));
}

template <>
inline float load_half<1>(const char* p) {
  return _cvtsh_ss(load_raw<uint16_t>(p));
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
