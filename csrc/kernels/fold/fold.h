// The one data operation: fold S sources into D destinations.
//
// Contract, for all i < count and d < ndst:
//   dsts[d][i] = srcs[0][i] (op) srcs[1][i] (op) ... (op) srcs[nsrc-1][i]
// * Serial shape: strictly left to right, ((s0 + s1) + s2) + ...
// * Tree shape: the in-order balanced tree. With p the largest power of two <= nsrc and
//   e = nsrc - p, first (s0,s1), (s2,s3), ... (s[2e-2], s[2e-1]) are combined; the p values that
//   remain, in order, are combined pairwise, level by level.
// * float16, bfloat16, float8_e4m3fn and float8_e5m2 are converted to float32, combined in float32,
//   and rounded once (to nearest even). What is too large for float8_e4m3fn, which has no infinity,
//   becomes NaN.
// * kAvg combines like kSum; `scale_n` > 0 divides the combined value by scale_n before it is
//   rounded and stored: floats by true division in the accumulation type, integers by truncation
//   towards zero. `scale_n` == 0 means: no division.
// * A bool is true if its byte is not 0; with several sources true is stored as 1.
// * Integers wrap modulo 2^bits. MIN and MAX propagate NaN: min(a, b) = (a < b || a != a) ? a : b,
//   likewise max.
// * nsrc == 1 is a copy (bit for bit, also NaN payloads, when scale_n == 0).
// * A destination may be identical to one source (in place); otherwise sources and destinations do
//   not overlap.
// * Pointers need no alignment. count == 0 is a no-op. No allocation, no exceptions, no locks.
// * The result does not depend on count, on alignment, on the instruction set, or on how a caller
//   splits the range.
#pragma once

#include "base/types.h"

namespace pycoll {

struct FoldSpec {
  DType dtype;
  ReduceOp op;
  bool tree;
  uint32_t scale_n;      // 0: none
  uint32_t nontemporal;  // hint, bit d: destination d will not be read again soon; kAll: none will
};

inline constexpr uint32_t kAll = ~uint32_t{0};  // also those that have no bit

inline constexpr int kMaxFoldSources = 4096;

// Runs one fold; see the contract above. Picks the widest instruction set of this CPU (AVX-512,
// AVX2 with F16C, or the baseline: SSE2 / NEON) once per process, unless force_isa was called.
void fold(const FoldSpec& spec, const void* const* srcs, int nsrc, void* const* dsts, int ndst,
          size_t count);

// Copies nbytes, optionally with non-temporal stores. Where the engine moves many bytes it does so
// here: memcpy is slow for some places (fold.cpp).
void copy(void* dst, const void* src, size_t nbytes, bool nontemporal = false);

// Copies nbytes to several places, block by block, so that each block is fetched once.
void copy_to_all(void* const* dsts, int ndst, const void* src, size_t nbytes, bool nontemporal);

// Whether `dst` lies less than 32 bytes behind `src`, but for whole pages, and this CPU's "rep
// movsb", with which memcpy and the kernel copy, is slow there.
bool slow_for_strings(const void* dst, const void* src);

// Divides count elements in place by n (the closing step of avg where no single fold saw all
// ranks).
void scale(DType dtype, void* data, size_t count, uint32_t n);

// Name of the instruction set that folds and optimizer steps use: "avx512", "avx2", "base". For
// tests and `doctor`.
const char* isa_name();

// Forces an instruction set for tests; returns false when this CPU lacks it.
bool force_isa(const char* name);

}  // namespace pycoll
