// The fold kernels, written once for all instruction sets; isa_*.cpp include them.
//
// A translation unit opens `namespace pycoll::<isa> { namespace {`, defines
//   constexpr int kWidth     bytes of a full vector register,
// includes this file under its target options, specialises load_half, pack_half, load_widened,
// load_signed_bytes, pack_bfloats and stream_vector where the instruction set has better, includes
// optim_kernels.inl too, and calls make_kernels.
// Everything here has internal linkage, and of std only types and compile-time values are used: no
// function compiled for a wide instruction set can stand in for one of another translation unit.
//
// Vectors are GCC vector extensions; a "vector" of one lane is the plain scalar, so the same code
// is the main loop and the tail. No expression here multiplies and adds floats, so no compiler
// option can contract it to a fused operation.

#include "kernels/fold/fold_lanes.inl"

// ---- kernels ---------------------------------------------------------------------------------

// Sources that belong to the left subtree of the in-order tree over n >= 2 sources: half of the p
// leaves, of which the first min(e, p / 2) are pairs.
constexpr int left_sources(int n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  const int e = n - p;
  return p / 2 + (e < p / 2 ? e : p / 2);
}

inline constexpr int kMaxRegisterSources = 8;

// Copies a part of the first destination to the others.
[[gnu::noinline]] inline void replicate(const FoldArgs& args, size_t offset, size_t nbytes) {
  offset += args.dst_offset;
  for (int d = 1; d < args.ndst; ++d) {
    __builtin_memcpy(args.dsts[d] + offset, args.dsts[0] + offset, nbytes);
  }
}

// One fold of `In` elements into `Out` elements (they differ where a float32 partial result is
// kept of narrow floats). S == 0: the number of sources is a run-time value, always serial.
template <ReduceOp O, typename In, typename Out, int S, bool kTree>
struct Kernel {
  template <int N>
  using L = Lanes<In, Out, N>;

  template <int N, int kFirst, int kCount>
  static PYCOLL_INLINE typename L<N>::V tree(const char* const* srcs, size_t i) {
    if constexpr (kCount == 1) {
      return L<N>::load(srcs[kFirst] + i);
    } else {
      constexpr int kLeft = left_sources(kCount);
      const auto left = tree<N, kFirst, kLeft>(srcs, i);
      return combine<O>(left, tree<N, kFirst + kLeft, kCount - kLeft>(srcs, i));
    }
  }

  static constexpr size_t out_offset(size_t i) {
    if constexpr (sizeof(Out) >= sizeof(In)) {
      return i * (sizeof(Out) / sizeof(In));
    } else {
      return i / (sizeof(In) / sizeof(Out));
    }
  }

  // Folds the kUnroll vectors of N lanes at byte i and stores them to the first ndst destinations.
  // `first` and `second` have dst_offset added already, and `srcs`, where S says how many there
  // are, src_offset.
  template <int N, int kUnroll>
  static PYCOLL_INLINE void step(const FoldArgs& args, const char* const* srcs, char* first,
                                 char* second, int ndst, size_t i) {
    constexpr size_t kStride = L<N>::kBytes;
    // With many sources, pieces this small are too short for the hardware prefetchers.
    constexpr bool kPrefetch = S == 0 && kUnroll > 1 && kUnroll * kStride < 256;
    constexpr size_t kPrefetchAhead = 1024;
    const int nsrc = S == 0 ? args.nsrc : S;
    const size_t at = S == 0 ? args.src_offset + i : i;
    typename L<N>::V acc[kUnroll];
    if constexpr (kTree) {
      for (int u = 0; u < kUnroll; ++u) acc[u] = tree<N, 0, S>(srcs, at + u * kStride);
    } else {
      for (int u = 0; u < kUnroll; ++u) acc[u] = L<N>::load(srcs[0] + at + u * kStride);
      for (int k = 1; k < nsrc; ++k) {
        const char* p = srcs[k] + at;
        if constexpr (kPrefetch) __builtin_prefetch(p + kPrefetchAhead);
        if constexpr (kPrefetch && kUnroll * kStride > 64) {
          __builtin_prefetch(p + kPrefetchAhead + 64);
        }
        for (int u = 0; u < kUnroll; ++u) {
          acc[u] = combine<O>(acc[u], L<N>::load(p + u * kStride));
        }
      }
    }
    decltype(L<N>::pack(acc[0])) result[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      if constexpr (O == ReduceOp::kAvg) acc[u] = acc[u] / static_cast<Acc<In>>(args.scale_n);
      result[u] = L<N>::pack(acc[u]);
      store_raw(first + out_offset(i + u * kStride), result[u]);
    }
    if (ndst == 1) return;
    for (int u = 0; u < kUnroll; ++u) store_raw(second + out_offset(i + u * kStride), result[u]);
    for (int d = 2; d < ndst; ++d) {
      char* p = args.dsts[d] + args.dst_offset + out_offset(i);
      for (int u = 0; u < kUnroll; ++u) store_raw(p + out_offset(u * kStride), result[u]);
    }
  }

  static void run(const FoldArgs& args) {
    constexpr int kLanes = kWidth / sizeof(Acc<In>);
    constexpr int kNarrow = 16 / sizeof(Acc<In>);
    // As many as leave enough registers for the constants of the conversions.
    constexpr int kWide = !kIsNarrowFloat<Out> && !(kTree && S > 4) ? 4 : kWidth == 16 ? 1 : 2;
    // Conversions of 8-bit floats are long enough to overlap by themselves.
    constexpr int kUnroll = kIs8BitFloat<In> || kIs8BitFloat<Out> ? 1 : kWide;
    constexpr size_t kVector = L<kLanes>::kBytes;
    constexpr size_t kNarrowVector = L<kNarrow>::kBytes;
    // Local copies: the stores might alias the caller's arrays, and every step would reload them.
    const char* local[S == 0 ? 1 : S];
    for (int k = 0; k < S; ++k) local[k] = args.srcs[k] + args.src_offset;
    const char* const* srcs = S == 0 ? args.srcs : local;
    char* first = args.dsts[0] + args.dst_offset;
    char* second = args.ndst > 1 ? args.dsts[1] + args.dst_offset : first;
    const size_t nbytes = args.nbytes;
    size_t i = 0;
    for (; nbytes - i >= kUnroll * kVector; i += kUnroll * kVector) {
      step<kLanes, kUnroll>(args, srcs, first, second, args.ndst, i);
    }
    const size_t tail = i;
    if constexpr (kUnroll > 1) {
      for (; nbytes - i >= kVector; i += kVector) {
        step<kLanes, 1>(args, srcs, first, second, 1, i);
      }
    }
    if constexpr (kNarrow < kLanes) {
      for (; nbytes - i >= kNarrowVector; i += kNarrowVector) {
        step<kNarrow, 1>(args, srcs, first, second, 1, i);
      }
    }
    for (; i < nbytes; i += sizeof(In)) {
      step<1, 1>(args, srcs, first, second, 1, i);
      asm("" : "+r"(i));  // keeps the compiler from vectorising a loop over a few elements
    }
    if (args.ndst > 1) replicate(args, out_offset(tail), out_offset(nbytes - tail));
  }
};

// The kernel for nsrc sources; beyond the specialised numbers the serial one. The shapes differ
// from four sources on. Operations that do not round are reduced over 5 to 7 sources too rarely to
// be worth kernels of their own.
template <ReduceOp O, typename In, typename Out, bool kTree>
FoldKernel kernel_for(int nsrc) {
  constexpr bool kRounds =
      std::is_floating_point_v<Acc<In>> && O != ReduceOp::kMin && O != ReduceOp::kMax;
  static constexpr FoldKernel kKernels[kMaxRegisterSources + 1] = {
      Kernel<O, In, Out, 0, false>::run,
      Kernel<O, In, Out, 0, false>::run,
      Kernel<O, In, Out, 2, false>::run,
      Kernel<O, In, Out, 3, false>::run,
      Kernel<O, In, Out, 4, kTree>::run,
      Kernel < O,
      In,
      Out,
      kRounds ? 5 : 0,
      kTree > ::run,
      Kernel < O,
      In,
      Out,
      kRounds ? 6 : 0,
      kTree > ::run,
      Kernel < O,
      In,
      Out,
      kRounds ? 7 : 0,
      kTree > ::run,
      Kernel<O, In, Out, 8, kTree>::run,
  };
  return kKernels[nsrc <= kMaxRegisterSources ? nsrc : 0];
}

template <ReduceOp O, typename T>
void fold_serial(const FoldArgs& args) {
  kernel_for<O, T, T, false>(args.nsrc)(args);
}

// Partial results of the tree, in the accumulation type: blocks that stay in the L1 cache.
// Subtrees of 4 to 8 sources are folded in registers, so kMaxFoldSources need 10 levels.
struct PartialBlocks {
  static constexpr size_t kBytes = 2048;
  static constexpr int kLevels = 10;
  static_assert((kMaxRegisterSources << (kLevels - 1)) >= kMaxFoldSources);
  alignas(64) char level[kLevels][kBytes];
};

// Folds one block of more than kMaxRegisterSources sources and stores it as Out. The blocks from
// `level` on are free. All sources are read before anything is stored.
template <ReduceOp O, typename T, typename Out>
void fold_tree_block(PartialBlocks& blocks, int level, const FoldArgs& args) {
  // Only the root divides.
  constexpr ReduceOp kInner = O == ReduceOp::kAvg ? ReduceOp::kSum : O;
  const int left = left_sources(args.nsrc);
  const char* partials[2];
  for (int side = 0; side < 2; ++side) {
    char* partial = blocks.level[level + side];
    FoldArgs subtree = args;
    subtree.srcs = side == 0 ? args.srcs : args.srcs + left;
    subtree.nsrc = side == 0 ? left : args.nsrc - left;
    subtree.dsts = &partial;
    subtree.ndst = 1;
    subtree.dst_offset = 0;
    if (subtree.nsrc <= kMaxRegisterSources) {
      kernel_for<kInner, T, Acc<T>, true>(subtree.nsrc)(subtree);
    } else {
      fold_tree_block<kInner, T, Acc<T>>(blocks, level + side, subtree);
    }
    partials[side] = partial;
  }
  FoldArgs root = args;
  root.srcs = partials;
  root.nsrc = 2;
  root.src_offset = 0;
  root.nbytes = args.nbytes / sizeof(T) * sizeof(Acc<T>);
  Kernel<O, Acc<T>, Out, 2, false>::run(root);
}

// Calls f with the arguments of one block of at most `block` bytes after the other.
template <typename F>
void for_each_block(const FoldArgs& args, size_t block, F f) {
  FoldArgs part = args;
  for (size_t i = 0; i < args.nbytes; i += block) {
    part.src_offset = args.src_offset + i;
    part.dst_offset = args.dst_offset + i;
    part.nbytes = args.nbytes - i < block ? args.nbytes - i : block;
    f(part);
  }
}

template <ReduceOp O, typename T>
void fold_tree(const FoldArgs& args) {
  if (args.nsrc <= kMaxRegisterSources) return kernel_for<O, T, T, true>(args.nsrc)(args);
  if (args.nsrc > kMaxFoldSources) std::abort();
  PartialBlocks blocks;
  for_each_block(args, PartialBlocks::kBytes / sizeof(Acc<T>) * sizeof(T),
                 [&](const FoldArgs& part) { fold_tree_block<O, T, T>(blocks, 0, part); });
}

// Divides integers, truncating. Of operands below 2^16 (2^32) in magnitude the quotient in float
// (double) truncates to the exact one: it is either an integer or at least 1 / divisor below one.
template <typename T>
void divide_integers(char* data, size_t nbytes, uint32_t scale_n) {
  using Quotient = std::conditional_t<
      sizeof(T) <= 2, float,
      std::conditional_t<sizeof(T) == 4, double,
                         std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>>;
  for (size_t i = 0; i < nbytes; i += sizeof(T)) {
    const T value = load_raw<T>(data + i);
    store_raw(data + i, static_cast<T>(static_cast<Quotient>(value) / scale_n));
  }
}

// The average of integers: the wrapped sum of a block, divided while it is in the L1 cache. Blocks
// are small enough for memcpy to move them to other destinations by vectors (kMayBeString).
template <typename T>
void fold_integer_avg(const FoldArgs& args) {
  for_each_block(args, 1024, [](const FoldArgs& part) {
    FoldArgs sum = part;
    sum.ndst = 1;
    fold_serial<ReduceOp::kSum, std::make_unsigned_t<T>>(sum);
    divide_integers<T>(part.dsts[0] + part.dst_offset, part.nbytes, part.scale_n);
    replicate(part, 0, part.nbytes);
  });
}

// ---- the table -------------------------------------------------------------------------------

using Elements =
    std::tuple<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, Half,
               BFloat, float, double, Truth, Float8E4M3, Float8E5M2>;  // by DType
static_assert(std::tuple_size_v<Elements> == kDTypeCount);

[[noreturn]] inline void fold_undefined(const FoldArgs&) { std::abort(); }

// The kernel of one (dtype, op, shape). Shapes matter to rounding operations only: all others are
// associative, so both shapes are the serial one. Signedness matters to min, max and avg only, and
// the element size does not matter to the bitwise operations.
template <FoldShape kShape, DType D, ReduceOp O>
constexpr FoldKernel select_kernel() {
  using T = std::tuple_element_t<static_cast<size_t>(D), Elements>;
  constexpr bool kBitwise = O == ReduceOp::kAnd || O == ReduceOp::kOr || O == ReduceOp::kXor;
  constexpr bool kOrdered = O == ReduceOp::kMin || O == ReduceOp::kMax;
  if constexpr (std::is_same_v<T, Truth>) {
    if constexpr (kBitwise || kOrdered) {  // of 0 and 1, min is and, max is or
      constexpr ReduceOp kAsBits = O == ReduceOp::kMin ? ReduceOp::kAnd : ReduceOp::kOr;
      return fold_serial < kOrdered ? kAsBits : O, T > ;
    } else {
      return fold_undefined;
    }
  } else if constexpr (std::is_integral_v<T>) {
    if constexpr (kBitwise) {
      return fold_serial<O, std::conditional_t<sizeof(T) >= 4, uint32_t, uint8_t>>;
    } else if constexpr (O == ReduceOp::kAvg) {
      return fold_integer_avg<T>;
    } else {
      return fold_serial<O, std::conditional_t<kOrdered, T, std::make_unsigned_t<T>>>;
    }
  } else if constexpr (kBitwise) {
    return fold_undefined;
  } else if constexpr (kShape == kShapeSerial || kOrdered) {
    return fold_serial<O, T>;
  } else {
    return fold_tree<O, T>;
  }
}

// Stores kWidth bytes to an aligned address past the caches, where the instruction set can.
inline void stream_vector(char* dst, const char* src);

inline void stream_bytes(char* dst, const char* src, size_t nbytes) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % kWidth;
  size_t head = misaligned == 0 ? 0 : kWidth - misaligned;
  if (head > nbytes) head = nbytes;
  __builtin_memcpy(dst, src, head);
  size_t i = head;
  for (; nbytes - i >= kWidth; i += kWidth) stream_vector(dst + i, src + i);
  __builtin_memcpy(dst + i, src + i, nbytes - i);
}

template <FoldShape kShape, size_t... I>
constexpr void fill_folds(Kernels& table, std::index_sequence<I...>) {
  ((table.fold[kShape][I / kReduceOpCount][I % kReduceOpCount] =
        select_kernel<kShape, static_cast<DType>(I / kReduceOpCount),
                      static_cast<ReduceOp>(I % kReduceOpCount)>()),
   ...);
}
