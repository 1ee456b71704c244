// Sums over ranks, residual add and RMSNorm of rows in one kernel: of every row [hidden]
//
//   s = sum over ranks                              rounded to the type
//   h = s + residual                                rounded to the type
//   y = h / sqrt(mean(h * h) + eps) * weight        in float32, rounded to the type
//
// One shot: every rank makes all rows for itself. Two shots: a rank makes its share of the rows and
// stores them on all ranks. A row is made by one block, in an order that depends on `hidden` alone,
// so results are the same for any number of ranks' blocks and threads, and in both ways.
//
// Order of the sum of squares. Eight neighbouring elements are a unit; what is missing of the last
// one counts as 0. A unit's squares are added along a binary tree, ((0+1)+(2+3))+((4+5)+(6+7)).
// Unit u belongs to lane u mod 512; a lane adds its units one after the other. The 512 lanes are
// added along a binary tree. pycoll/runtime/arrays/rms_norm.py says the same in NumPy.
#pragma once

#include <cmath>

#include "cuda/kernels/kernels.h"
#include "cuda/kernels/signals.h"

namespace pycoll::cuda {

inline constexpr uint32_t kNormLanes = 512, kNormGroups = 32;
inline constexpr uint32_t kLanesOfGroup = kNormLanes / kNormGroups;

// Memory of a block: sums of lanes, and of groups of neighbouring lanes. Groups lie a word further
// apart than they are long, so threads that add one each use different banks.
struct NormSums {
  float lanes[kNormLanes + kNormGroups];
  float groups[kNormGroups];
};
PYCOLL_BOTH uint32_t place_of_lane(uint32_t lane) { return lane + lane / kLanesOfGroup; }

// The sum of kCount numbers along a binary tree.
template <int kCount>
PYCOLL_DEVICE float tree_sum(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return tree_sum<kCount / 2>(values) + tree_sum<kCount / 2>(values + kCount / 2);
  }
}

// How a thread makes rows of T.
template <typename P, typename T>
class RowMaker {
 public:
  PYCOLL_DEVICE RowMaker(const P& p, const NormLaunch& launch, NormSums& sums, uint32_t rank)
      : p_(p),
        a_(launch),
        sums_(sums),
        rank_(rank),
        units_((launch.hidden + kUnit - 1) / kUnit),
        rounds_(static_cast<uint32_t>((units_ + kNormLanes - 1) / kNormLanes)) {
    const Launch& call = launch.call;
    Shared& s = p.shared();
    const uint32_t ndst = call.push ? call.world_size : 1;
    view_ = {s.in,      s.out + (call.push ? 0 : rank), call.world_size, ndst, call.tree != 0,
             {0, false}};
    kept_ = launch.residual_out + (call.push ? 0 : rank);
  }

  // By all threads of a block.
  PYCOLL_DEVICE void make(uint64_t row) {
    const uint64_t first = row * a_.hidden;
    Unit held[kHeld] = {};
    float sum = 0;
    for_each_turn([&](uint32_t turn, uint32_t lane, uint64_t unit, bool last) {
      Unit h = {};
      if (unit < units_) h = make_unit(first, unit);
      PYCOLL_UNROLL
      for (uint32_t i = 0; i < kHeld; ++i) {
        if (turn == i) held[i] = h;
      }
      sum = sum + sum_of_squares(h);
      if (!last) return;
      sums_.lanes[place_of_lane(lane)] = sum;
      sum = 0;
    });
    const float root = std::sqrt(sum_of_lanes() / static_cast<float>(a_.hidden) + a_.eps);
    for_each_turn([&](uint32_t turn, uint32_t, uint64_t unit, bool) {
      if (unit >= units_) return;
      Unit h = held[0];
      PYCOLL_UNROLL
      for (uint32_t i = 1; i < kHeld; ++i) {
        if (turn == i) h = held[i];
      }
      if (turn >= kHeld) h = make_unit(first, unit);
      write_unit(first, unit, h, root);
    });
  }

 private:
  using F = Folder<P, T, ReduceOp::kSum>;
  template <int kBytes>
  using L = Lanes<P, T, kBytes>;
  static constexpr int kUnit = 8, kSize = sizeof(T);
  static constexpr int kPacks = kUnit * kSize / 16;
  static constexpr uint32_t kHeld = 4 / kPacks;  // units that a thread keeps; others it makes twice
  using Word = std::conditional_t<kSize == 2, uint16_t, uint32_t>;
  using Unit = Values<Raw<16>, kPacks>;  // rounded

  // Visits the places of this thread's lanes: visit(turn, lane, unit, whether it is the lane's
  // last). Short lanes have places of units that there are not.
  template <typename Visit>
  PYCOLL_DEVICE void for_each_turn(Visit visit) const {
    uint32_t turn = 0;
    PYCOLL_ROLLED
    for (uint32_t lane = p_.tid(); lane < kNormLanes; lane += p_.threads()) {
      PYCOLL_ROLLED
      for (uint32_t round = 0; round < rounds_; ++round, ++turn) {
        visit(turn, lane, lane + uint64_t{round} * kNormLanes, round + 1 == rounds_);
      }
    }
  }

  template <int kN, bool kTree>
  PYCOLL_DEVICE typename L<16>::Vals sum_exactly(uint64_t at) const {
    Raw<16> raw[kN];
    PYCOLL_UNROLL
    for (int k = 0; k < kN; ++k) raw[k] = p_.template load<16>(view_.src[k] + at);
    return F::template join<0, kN, kTree>(p_, raw);
  }

  template <int kBytes>
  PYCOLL_DEVICE typename L<kBytes>::Vals sum_any(uint64_t at) const {
    const auto from = [&](uint32_t k) { return F::template read<kBytes>(p_, view_.src[k] + at); };
    if (view_.tree && view_.nsrc > 3) return F::template tree<kBytes>(view_.nsrc, from);
    return F::template serial<kBytes>(view_.nsrc, from);
  }

  // The sum over ranks of the pack at byte `at`, rounded.
  PYCOLL_DEVICE Raw<16> sum_pack(uint64_t at) const {
    switch (view_.nsrc) {
      case 1:
        return p_.template load<16>(view_.src[0] + at);
      case 2:
        return L<16>::encode(p_, sum_exactly<2, false>(at));
      case 4:
        return L<16>::encode(p_, view_.tree ? sum_exactly<4, true>(at) : sum_exactly<4, false>(at));
      case 8:
        return L<16>::encode(p_, view_.tree ? sum_exactly<8, true>(at) : sum_exactly<8, false>(at));
      default:
        break;
    }
    if constexpr (kSize == 2) {  // in halves: all accumulators of a tree at once would not fit
      Values<Raw<8>, 2> halves;
      PYCOLL_ROLLED
      for (int i = 0; i < 2; ++i) {
        (i == 0 ? halves.v[0] : halves.v[1]) = L<8>::encode(p_, sum_any<8>(at + 8 * i));
      }
      return __builtin_bit_cast(Raw<16>, halves);
    } else {
      return L<16>::encode(p_, sum_any<16>(at));
    }
  }

  template <int kBytes>
  PYCOLL_DEVICE Raw<kBytes> add(const Raw<kBytes>& s, const Raw<kBytes>& residual) const {
    return L<kBytes>::encode(
        p_, combine<ReduceOp::kSum>(L<kBytes>::decode(p_, s), L<kBytes>::decode(p_, residual)));
  }

  // Elements of a unit that there are.
  PYCOLL_DEVICE uint32_t length_of(uint64_t unit) const {
    const uint64_t left = a_.hidden - unit * kUnit;
    return left < kUnit ? static_cast<uint32_t>(left) : kUnit;
  }

  // h of a unit of the row that begins at element `first`.
  PYCOLL_DEVICE Unit make_unit(uint64_t first, uint64_t unit) const {
    const uint64_t at = (first + unit * kUnit) * kSize;
    const char* const residual = a_.residual[rank_];
    if (a_.vectors) {
      Unit h, more = {};
      PYCOLL_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        if (residual != nullptr) more.v[i] = p_.template load<16>(residual + at + 16 * i);
      }
      PYCOLL_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        h.v[i] = sum_pack(at + 16 * i);
        if (residual != nullptr) h.v[i] = add<16>(h.v[i], more.v[i]);
      }
      return h;
    }
    Values<Word, kUnit> words = {};
    const uint32_t length = length_of(unit);
    PYCOLL_ROLLED
    for (uint32_t i = 0; i < length; ++i) {
      auto h = L<kSize>::encode(p_, sum_any<kSize>(at + i * kSize));
      if (residual != nullptr) {
        h = add<kSize>(h, p_.template load<kSize>(residual + at + i * kSize));
      }
      PYCOLL_UNROLL
      for (uint32_t k = 0; k < kUnit; ++k) {  // an index known to the compiler: in registers
        if (k == i) words.v[k] = h.w[0];
      }
    }
    return __builtin_bit_cast(Unit, words);
  }

  PYCOLL_DEVICE float sum_of_squares(const Unit& h) const {
    float squares[kUnit];
    PYCOLL_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const auto values = L<16>::decode(p_, h.v[i]);
      PYCOLL_UNROLL
      for (int k = 0; k < 16 / kSize; ++k) {
        squares[i * (16 / kSize) + k] = values.v[k] * values.v[k];
      }
    }
    return tree_sum<kUnit>(squares);
  }

  // The sum of what all threads have put into lanes. Lanes are written again only behind the first
  // barrier of the next row, groups behind the second one.
  PYCOLL_DEVICE float sum_of_lanes() const {
    p_.barrier();
    for (uint32_t group = p_.tid(); group < kNormGroups; group += p_.threads()) {
      sums_.groups[group] =
          tree_sum<kLanesOfGroup>(sums_.lanes + place_of_lane(group * kLanesOfGroup));
    }
    p_.barrier();
    return tree_sum<kNormGroups>(sums_.groups);
  }

  template <int kBytes>
  PYCOLL_DEVICE void write_part(uint64_t at, const Raw<kBytes>& h, const Raw<kBytes>& weight,
                                float root) const {
    auto y = L<kBytes>::decode(p_, h);
    const auto scale = L<kBytes>::decode(p_, weight);
    PYCOLL_UNROLL
    for (int k = 0; k < L<kBytes>::kCount; ++k) y.v[k] = y.v[k] / root * scale.v[k];
    const auto raw = L<kBytes>::encode(p_, y);
    PYCOLL_ROLLED
    for (uint32_t d = 0; d < view_.ndst; ++d) {
      p_.store(view_.dst[d] + at, raw);
      if (kept_[d] != nullptr) p_.store(kept_[d] + at, h);
    }
  }

  PYCOLL_DEVICE void write_unit(uint64_t first, uint64_t unit, const Unit& h, float root) const {
    const uint64_t at = (first + unit * kUnit) * kSize;
    const char* const weight = a_.weight + unit * kUnit * kSize;
    if (a_.vectors) {
      PYCOLL_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        write_part<16>(at + 16 * i, h.v[i], p_.template load<16>(weight + 16 * i), root);
      }
      return;
    }
    const auto words = __builtin_bit_cast(Values<Word, kUnit>, h);
    const uint32_t length = length_of(unit);
    PYCOLL_ROLLED
    for (uint32_t i = 0; i < length; ++i) {
      Word word = words.v[0];
      PYCOLL_UNROLL
      for (uint32_t k = 1; k < kUnit; ++k) {
        if (k == i) word = words.v[k];
      }
      write_part<kSize>(at + i * kSize, {word}, p_.template load<kSize>(weight + i * kSize), root);
    }
  }

  const P& p_;
  const NormLaunch& a_;
  NormSums& sums_;
  uint32_t rank_;
  uint64_t units_;     // of a row
  uint32_t rounds_;    // units of a lane, at most
  FoldView view_;      // from the inputs to the normalised rows
  char* const* kept_;  // where h goes
};

// One block of one rank. Rows of a rank are dealt out to its blocks; every rank has as many blocks,
// so when block b of all ranks is done, whoever leaves has seen all of them done.
template <typename T, typename P>
PYCOLL_DEVICE void run_rank_norm(const P& p, const NormLaunch& launch, NormSums& sums,
                                 uint32_t rank, uint32_t block) {
  const Launch& call = launch.call;
  if (call.absent >> rank & 1) return;
  Member<P> m(p, call, rank, block);
  if (!m.enter()) return;
  m.signal(kEntered, false);
  if (!m.await_all(kEntered, 1)) return;
  const uint64_t n = call.push ? call.world_size : 1;
  const uint64_t share = (launch.rows + n - 1) / n;
  const uint64_t begin = call.push ? share * rank : 0;
  const uint64_t end = begin + share < launch.rows ? begin + share : launch.rows;
  RowMaker<P, T> maker(p, launch, sums, rank);
  for (uint64_t row = begin + block; row < end; row += call.nblocks) maker.make(row);
  m.signal(kDone);
  if (!m.await_all(kDone, call.world_size + 2)) return;
  m.finish();
}

}  // namespace pycoll::cuda
