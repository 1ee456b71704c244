// The one data operation on the device: fold S sources into D destinations. The contract of
// csrc/kernels/fold/fold.h; see there for the two orders.
//
// The threads of a block share a range of bytes in packs of 16, neighbouring packs to neighbouring
// threads. Of every element all sources are read before its result is stored, by one thread, so a
// destination may be identical to a source.
#pragma once

#include "cuda/kernels/elements.h"

namespace pycoll::cuda {

inline constexpr int kMaxRanks = 64;  // PYCOLL_CUDA_MAX_RANKS

// What to fold: arrays of pointers to byte 0 of a piece.
struct FoldView {
  const char* const* src;
  char* const* dst;
  uint32_t nsrc, ndst;
  bool tree;
  Scale scale;
};

// Sources in the left subtree of the in-order tree over n >= 2 sources; as in fold_kernels.inl.
PYCOLL_BOTH constexpr int left_sources(int n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  const int e = n - p;
  return p / 2 + (e < p / 2 ? e : p / 2);
}

// Moves only: there is nothing to combine.
template <typename P>
struct Mover {
  // Copies [begin, end), multiples of kBytes, in pieces of kBytes.
  template <int kBytes>
  static PYCOLL_DEVICE void range(const P& p, const FoldView& f, uint64_t begin, uint64_t end) {
    constexpr int kUnroll = kBytes == 16 ? 4 : 1;
    const uint64_t stride = uint64_t{p.threads()} * kBytes;
    const char* const src = f.src[0];
    uint64_t i = begin + uint64_t{p.tid()} * kBytes;
    PYCOLL_ROLLED
    for (; i + (kUnroll - 1) * stride < end; i += kUnroll * stride) {
      Raw<kBytes> raw[kUnroll];
      PYCOLL_UNROLL
      for (int u = 0; u < kUnroll; ++u) raw[u] = p.template load<kBytes>(src + i + u * stride);
      for (uint32_t d = 0; d < f.ndst; ++d) {
        if (f.dst[d] == src) continue;
        PYCOLL_UNROLL
        for (int u = 0; u < kUnroll; ++u) p.store(f.dst[d] + i + u * stride, raw[u]);
      }
    }
    PYCOLL_ROLLED
    for (; i < end; i += stride) {
      const auto raw = p.template load<kBytes>(src + i);
      for (uint32_t d = 0; d < f.ndst; ++d) {
        if (f.dst[d] != src) p.store(f.dst[d] + i, raw);
      }
    }
  }
};

template <typename P, typename T, ReduceOp kOp>
struct Folder {
  // Every other operation is associative, so both orders are the serial one.
  static constexpr bool kRounds =
      std::is_floating_point_v<Acc<T>> && (kOp == ReduceOp::kSum || kOp == ReduceOp::kProd);

  template <int kBytes>
  using L = Lanes<P, T, kBytes>;

  template <int kBytes>
  static PYCOLL_DEVICE typename L<kBytes>::Vals read(const P& p, const char* at) {
    return L<kBytes>::decode(p, p.template load<kBytes>(at));
  }

  // What is stored of a fold: divided, and rounded.
  template <int kBytes>
  static PYCOLL_DEVICE Raw<kBytes> result(const P& p, Scale scale, typename L<kBytes>::Vals acc) {
    if constexpr (kOp == ReduceOp::kSum) {
      if (scale.n != 0) acc = divide(acc, scale);
    }
    return L<kBytes>::encode(p, acc);
  }

  template <int kBytes>
  static PYCOLL_DEVICE void write(const P& p, const FoldView& f, uint64_t i,
                                  const typename L<kBytes>::Vals& acc) {
    const auto raw = result<kBytes>(p, f.scale, acc);
    PYCOLL_ROLLED
    for (uint32_t d = 0; d < f.ndst; ++d) p.store(f.dst[d] + i, raw);
  }

  // Left to right; `from(k)` returns the values of source k.
  template <int kBytes, typename From>
  static PYCOLL_DEVICE typename L<kBytes>::Vals serial(uint32_t nsrc, From from) {
    auto acc = from(0);
    PYCOLL_UNROLL_4
    for (uint32_t k = 1; k < nsrc; ++k) acc = combine<kOp>(acc, from(k));
    return acc;
  }

  // The in-order tree, leaf by leaf: held[l] is a finished subtree of 2^l leaves, as in a binary
  // counter. Indices are compile-time, so it lies in registers. It begins with zeros, which nobody
  // reads: without, its registers would be taken from the start of a kernel on.
  template <int kBytes, typename From>
  static PYCOLL_DEVICE typename L<kBytes>::Vals tree(uint32_t nsrc, From from) {
    constexpr int kLevels = 6;
    static_assert(kMaxRanks <= 1 << kLevels);
    uint32_t leaves = 1;
    while (2 * leaves <= nsrc) leaves *= 2;
    const uint32_t pairs = nsrc - leaves;
    typename L<kBytes>::Vals held[kLevels] = {}, carry;
    uint32_t k = 0;
    PYCOLL_ROLLED
    for (uint32_t leaf = 0; leaf < leaves; ++leaf) {
      carry = from(k++);
      if (leaf < pairs) carry = combine<kOp>(carry, from(k++));
      bool carrying = true;
      PYCOLL_UNROLL
      for (int l = 0; l < kLevels; ++l) {
        if (carrying && (leaf >> l & 1) != 0) {
          carry = combine<kOp>(held[l], carry);
        } else if (carrying) {
          held[l] = carry;
          carrying = false;
        }
      }
    }
    return carry;
  }

  // The fold of one pack (or of half of one).
  template <int kBytes>
  static PYCOLL_DEVICE void one(const P& p, const FoldView& f, uint64_t i) {
    const auto from = [&](uint32_t k) { return read<kBytes>(p, f.src[k] + i); };
    if constexpr (kRounds) {
      if (f.tree && f.nsrc > 3) return write<kBytes>(p, f, i, tree<kBytes>(f.nsrc, from));
    }
    write<kBytes>(p, f, i, serial<kBytes>(f.nsrc, from));
  }

  // Folds [begin, end), multiples of kBytes.
  template <int kBytes>
  static PYCOLL_DEVICE void range(const P& p, const FoldView& f, uint64_t begin, uint64_t end) {
    const uint64_t stride = uint64_t{p.threads()} * kBytes;
    uint64_t i = begin + uint64_t{p.tid()} * kBytes;
    if (f.nsrc == 1 && f.scale.n == 0) return Mover<P>::template range<kBytes>(p, f, begin, end);
    if constexpr (kBytes == 16) {
      if (f.nsrc == 2 && f.scale.n == 0) return pairs(p, f, begin, end);
    }
    // Narrow floats in parts of a pack: all their accumulators at once would not fit.
    constexpr int kPart = kIsNarrowFloat<T> && kBytes == 16 ? 4 * sizeof(T) : kBytes;
    PYCOLL_ROLLED
    for (; i < end; i += stride) {
      PYCOLL_ROLLED
      for (int part = 0; part < kBytes; part += kPart) one<kPart>(p, f, i + part);
    }
  }

  // Two packs. 8-bit floats go word by word, each to where it is needed next: the values of whole
  // packs would not fit.
  static PYCOLL_DEVICE Raw<16> fold_two(const P& p, Raw<16> a, Raw<16> b) {
    if constexpr (kIs8BitFloat<T>) {
      PYCOLL_ROLLED
      for (int word = 0; word < 4; ++word) {
        const auto left = L<4>::decode(p, {{a.w[0]}}), right = L<4>::decode(p, {{b.w[0]}});
        const Raw<4> folded = L<4>::encode(p, combine<kOp>(left, right));
        a = {{a.w[1], a.w[2], a.w[3], folded.w[0]}};
        b = {{b.w[1], b.w[2], b.w[3], 0}};
      }
      return a;
    } else {
      return L<16>::encode(p, combine<kOp>(L<16>::decode(p, a), L<16>::decode(p, b)));
    }
  }

  // Two sources, a step of a ring: enough loads in flight from one thread. A turn ends with those
  // of the next one: the assembler puts loads between computations, but not across the end of a
  // turn.
  static PYCOLL_DEVICE void pairs(const P& p, const FoldView& f, uint64_t begin, uint64_t end) {
    const uint64_t stride = uint64_t{p.threads()} * 16;
    const char *const a = f.src[0], *const b = f.src[1];
    uint64_t i = begin + uint64_t{p.tid()} * 16, j = 0;
    Raw<16> raw[4] = {};
    const auto read_turn = [&] {
      if (i >= end) return;
      j = i + stride < end ? i + stride : i;
      raw[0] = p.template load<16>(a + i);
      raw[1] = p.template load<16>(b + i);
      raw[2] = p.template load<16>(a + j);
      raw[3] = p.template load<16>(b + j);
    };
    PYCOLL_ROLLED
    for (read_turn(); i < end; i += 2 * stride, read_turn()) {
      const auto first = fold_two(p, raw[0], raw[1]);
      const auto second = fold_two(p, raw[2], raw[3]);
      PYCOLL_ROLLED
      for (uint32_t d = 0; d < f.ndst; ++d) {
        p.store(f.dst[d] + i, first);
        p.store(f.dst[d] + j, second);
      }
    }
  }

  // ---- a number of sources that is known to the compiler
  // -----------------------------------------

  template <int kFirst, int kCount, bool kTree, int kBytes, int kN>
  static PYCOLL_DEVICE typename L<kBytes>::Vals join(const P& p, const Raw<kBytes> (&raw)[kN]) {
    if constexpr (kCount == 1) {
      return L<kBytes>::decode(p, raw[kFirst]);
    } else {
      constexpr int kLeft = kTree ? left_sources(kCount) : kCount - 1;
      const auto left = join<kFirst, kLeft, kTree>(p, raw);
      return combine<kOp>(left, join<kFirst + kLeft, kCount - kLeft, kTree>(p, raw));
    }
  }

  // kPacks packs, `stride` bytes apart: those of them that begin before `end`, as the first does.
  template <int kN, bool kTree, int kPacks>
  static PYCOLL_DEVICE void packs(const P& p, const FoldView& f, uint64_t i, uint64_t stride,
                                  uint64_t end) {
    Raw<16> raw[kPacks][kN] = {};
    PYCOLL_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      const bool inside = u == 0 || i + u * stride < end;
      PYCOLL_UNROLL
      for (int k = 0; k < kN; ++k) {
        if (inside) raw[u][k] = p.template load<16>(f.src[k] + i + u * stride);
      }
    }
    PYCOLL_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      if (u > 0 && i + u * stride >= end) break;
      write<16>(p, f, i + u * stride, join<0, kN, kTree>(p, raw[u]));
    }
  }

  // Like range<16>, with eight loads in flight from every thread.
  template <int kN, bool kTree>
  static PYCOLL_DEVICE void exact(const P& p, const FoldView& f, uint64_t begin, uint64_t end) {
    constexpr int kPacks = 8 / kN;
    const uint64_t stride = uint64_t{p.threads()} * 16;
    PYCOLL_ROLLED
    for (uint64_t i = begin + uint64_t{p.tid()} * 16; i < end; i += kPacks * stride) {
      packs<kN, kTree, kPacks>(p, f, i, stride, end);
    }
  }
};

// Fold of plans that only move, for elements of any size.
template <typename P>
struct Copier {
  template <int kBytes>
  static PYCOLL_DEVICE void range(const P& p, const FoldView& f, uint64_t begin, uint64_t end) {
    Mover<P>::template range<kBytes>(p, f, begin, end);
  }
};

// How far all pieces of a fold are aligned alike: 16, 4, or less.
PYCOLL_DEVICE uint32_t common_alignment(const FoldView& f) {
  const auto first = reinterpret_cast<uintptr_t>(f.src[0]);
  uintptr_t difference = 0;
  for (uint32_t k = 1; k < f.nsrc; ++k) {
    difference |= reinterpret_cast<uintptr_t>(f.src[k]) ^ first;
  }
  for (uint32_t d = 0; d < f.ndst; ++d) {
    difference |= reinterpret_cast<uintptr_t>(f.dst[d]) ^ first;
  }
  return difference % 16 == 0 ? 16 : difference % 4 == 0 ? 4 : 1;
}

// Where the packs of a range begin and end; elements before and behind go one by one.
struct Split {
  uint64_t begin, end;
};
PYCOLL_DEVICE Split split(const char* first, uint32_t pack, uint64_t begin, uint64_t end) {
  const uint64_t misaligned = (reinterpret_cast<uintptr_t>(first) + begin) % pack;
  const uint64_t head = misaligned == 0 ? 0 : pack - misaligned;
  if (head >= end - begin) return {end, end};
  return {begin + head, end - (end - begin - head) % pack};
}

// Folds bytes [begin, end) of every piece, multiples of kSize, by the threads of one block.
// `packs` folds whole packs of 16; everything else goes through F::range.
template <typename F, int kSize, typename P, typename Packs>
PYCOLL_DEVICE void fold_range(const P& p, const FoldView& f, uint64_t begin, uint64_t end,
                              Packs packs) {
  if (begin >= end) return;
  const uint32_t alignment = common_alignment(f);
  Split body{end, end};
  if (alignment == 16) {
    body = split(f.src[0], 16, begin, end);
    packs(body.begin, body.end);
  } else if (kSize < 4 && alignment == 4) {
    body = split(f.src[0], 4, begin, end);
    if constexpr (kSize < 4) F::template range<4>(p, f, body.begin, body.end);
  }
  PYCOLL_ROLLED
  for (int side = 0; side < 2; ++side) {
    const uint64_t from = side == 0 ? begin : body.end, to = side == 0 ? body.begin : end;
    if (from < to) F::template range<kSize>(p, f, from, to);
  }
}

}  // namespace pycoll::cuda
