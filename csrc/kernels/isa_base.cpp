// The kernels for every CPU: 16-byte vectors as the compiler lowers them (SSE2 on x86-64, NEON on
// AArch64).
#include "kernels/isa.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pycoll {
namespace base {
namespace {

constexpr int kWidth = 16;

#include "kernels/fold/fold_kernels.inl"
#include "kernels/optim/optim_kernels.inl"

inline void stream_vector(char* dst, const char* src) {
#if defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(dst), load_raw<__m128i>(src));
#else
  store_raw(dst, load_raw<Vec<uint8_t, kWidth> >(src));
#endif
}

constexpr Kernels kKernels = make_kernels("base");

}  // namespace
}  // namespace base

const Kernels kBaseKernels = base::kKernels;

}  // namespace pycoll
