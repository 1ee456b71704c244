#include "kernels/fold/fold.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

#include "kernels/isa.h"

namespace pycoll {
namespace {

// Bytes that are read once and then written to every destination.
constexpr size_t kBlock = 4096;
// Below this many bytes the alignment of the destination is not worth a call of its own.
constexpr size_t kAlignFrom = 2048;
// Below this many bytes the fence costs more than the caches gain.
constexpr size_t kNontemporalFrom = 4096;
constexpr size_t kCacheLine = 64;

inline void store_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// From here on "rep movsb" copies faster than a loop over vectors, where the processor has it fast:
// on an EPYC 64 KiB in 0.67 us instead of 0.91, and 2 MiB that are in no cache in 166 us instead of
// 194. memcpy chooses it too, but that of glibc 2.36 only up to the size of the L2 cache.
constexpr size_t kStringFrom = 64 << 10;
// memcpy may choose it from about here on.
constexpr size_t kMayBeString = 2 << 10;

#if defined(__x86_64__)
// Whether "rep movsb" is fast, as the processor itself says (FSRM: Intel since Ice Lake, AMD since
// Zen 3).
bool has_fast_string() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kFsrm = 1u << 4;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kFsrm) != 0;
}

bool is_amd() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}

const bool g_fast_string = has_fast_string(), g_amd = is_amd();
#else
constexpr bool g_amd = false;
#endif

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
inline void copy_bytes(const Kernels& isa, char* dst, const char* src, size_t n) {
  if (n >= kMayBeString && slow_for_strings(dst, src)) {
    isa.fold[kShapeSerial][static_cast<size_t>(DType::kUInt8)][static_cast<size_t>(ReduceOp::kSum)](
        {&src, &dst, 1, 1, 0, 0, n, 0});
  } else if (n >= kStringFrom && g_fast_string) {
    asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(n) : : "memory");
  } else {
    std::memcpy(dst, src, n);
  }
}
#else
inline void copy_bytes(const Kernels&, char* dst, const char* src, size_t n) {
  std::memcpy(dst, src, n);
}
#endif

// Bytes before `p` reaches a cache line, if whole elements fit in between; else 0.
inline size_t bytes_to_alignment(const void* p, size_t itemsize) {
  const size_t bytes = -reinterpret_cast<uintptr_t>(p) % kCacheLine;
  return bytes % itemsize == 0 ? bytes : 0;
}

inline bool is_set(uint32_t bits, int d) {
  return bits == kAll || (d < 32 && (bits >> d & 1) != 0);
}

// Copies one source to all destinations; with several, block by block, so that each block is
// fetched once.
void copy_to_all(const Kernels& isa, const FoldArgs& args, uint32_t nontemporal) {
  const size_t block = args.ndst == 1 ? args.nbytes : kBlock;
  for (size_t i = 0; i < args.nbytes; i += block) {
    const size_t n = args.nbytes - i < block ? args.nbytes - i : block;
    for (int d = 0; d < args.ndst; ++d) {
      if (args.dsts[d] == args.srcs[0]) continue;
      if (is_set(nontemporal, d)) {
        isa.stream(args.dsts[d] + i, args.srcs[0] + i, n);
      } else {
        copy_bytes(isa, args.dsts[d] + i, args.srcs[0] + i, n);
      }
    }
  }
  if (nontemporal != 0) store_fence();
}

// Non-temporal stores of whole cache lines to some destinations, whatever their alignments: each
// block is folded into the L1 cache and goes on from there.
void fold_nontemporal(const Kernels& isa, FoldKernel kernel, const FoldArgs& args, uint32_t which) {
  alignas(kCacheLine) char buffer[kBlock];
  char* const folded = buffer;
  FoldArgs part = args;
  part.dsts = &folded;
  part.ndst = 1;
  for (size_t i = 0; i < args.nbytes; i += kBlock) {
    part.src_offset = i;
    part.nbytes = args.nbytes - i < kBlock ? args.nbytes - i : kBlock;
    kernel(part);
    for (int d = 0; d < args.ndst; ++d) {
      if (is_set(which, d)) {
        isa.stream(args.dsts[d] + i, buffer, part.nbytes);
      } else {
        copy_bytes(isa, args.dsts[d] + i, buffer, part.nbytes);
      }
    }
  }
  store_fence();
}

}  // namespace

void fold(const FoldSpec& spec, const void* const* srcs, int nsrc, void* const* dsts, int ndst,
          size_t count) {
  const Kernels& isa = kernels();
  const auto dtype = static_cast<size_t>(spec.dtype);
  const size_t itemsize = pycoll::itemsize(spec.dtype);
  const size_t nbytes = count * itemsize;
  FoldArgs args{reinterpret_cast<const char* const*>(srcs),
                reinterpret_cast<char* const*>(dsts),
                nsrc,
                ndst,
                0,
                0,
                nbytes,
                spec.scale_n};
  const uint32_t nontemporal = nbytes >= kNontemporalFrom ? spec.nontemporal : 0;
  ReduceOp op = spec.op;
  if (op == ReduceOp::kAvg && spec.scale_n == 0) op = ReduceOp::kSum;
  if (nsrc == 1 && op != ReduceOp::kAvg) return copy_to_all(isa, args, nontemporal);
  const FoldKernel kernel =
      isa.fold[spec.tree ? kShapeTree : kShapeSerial][dtype][static_cast<size_t>(op)];
  if (nontemporal != 0) return fold_nontemporal(isa, kernel, args, nontemporal);
  const size_t head = nbytes >= kAlignFrom ? bytes_to_alignment(args.dsts[0], itemsize) : 0;
  if (head > 0) {
    args.nbytes = head;
    kernel(args);
    args.src_offset = args.dst_offset = head;
    args.nbytes = nbytes - head;
  }
  kernel(args);
}

void copy(void* dst, const void* src, size_t nbytes, bool nontemporal) {
  copy_to_all(&dst, 1, src, nbytes, nontemporal);
}

void copy_to_all(void* const* dsts, int ndst, const void* src, size_t nbytes, bool nontemporal) {
  const auto* from = static_cast<const char*>(src);
  copy_to_all(kernels(), {&from, reinterpret_cast<char* const*>(dsts), 1, ndst, 0, 0, nbytes, 0},
              nontemporal && nbytes >= kNontemporalFrom ? kAll : 0);
}

void scale(DType dtype, void* data, size_t count, uint32_t n) {
  const void* src = data;
  fold({dtype, ReduceOp::kAvg, false, n, 0}, &src, 1, &data, 1, count);
}

// It is common: large arrays begin 16 bytes into a page, where malloc puts them, and cells at the
// beginning of one. AMD's Zen 3 takes 17 to 25 times as long there (128 KiB: 48 to 85 us instead of
// 2.8). Intel's processors are left to memcpy: there a loop over vectors would wait for its own
// stores, which look like those to the addresses it loads from.
bool slow_for_strings(const void* dst, const void* src) {
  constexpr uintptr_t kPage = 4096, kSlow = 32;
  const uintptr_t behind =
      (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) % kPage;
  return g_amd && behind - 1 < kSlow - 1;
}

}  // namespace pycoll
