// Plans that push, over a multicast address: the sum of two shots by pushing, made by the switch
// between devices (a rank loads its chunk of the heaps of all ranks as one sum, and stores that in
// all of them at once), and blocks that a rank pushes to all others (it stores them once).
//
// A multicast address stands for the same place of every heap. So all arrays have to lie at the
// same place of theirs, and begin with a pack of 16 bytes; otherwise, and for what is less than a
// pack, the chunk is folded or copied as in direct.h. Every element is summed by one rank, so all
// ranks get the same bits; but nothing states in which order a switch adds, so only who asks for no
// order may get here. Copies have no order.
#pragma once

#include "cuda/kernels/direct.h"

namespace pycoll::cuda {

// Whether outputs lie at one place of all heaps, and inputs too where all of them are read.
template <typename P>
PYCOLL_DEVICE bool lie_alike(const P& p, const Launch& launch, bool inputs) {
  const Shared& s = p.shared();
  bool alike = launch.multicast != nullptr;
  PYCOLL_ROLLED
  for (uint32_t q = 0; q < launch.world_size && alike; ++q) {
    alike = s.dst[q] - launch.heaps[q] == s.dst[0] - launch.heaps[0] &&
            (!inputs || s.src[q] - launch.heaps[q] == s.src[0] - launch.heaps[0]);
  }
  return alike;
}

// One block of one rank of a peer group.
template <typename W, typename P>
PYCOLL_DEVICE void run_rank_multicast(const P& p, const Launch& launch, uint32_t rank,
                                      uint32_t block) {
  run_rank_of_one_fold<W>(
      p, launch, rank, block, [&](const FoldView& view, uint64_t begin, uint64_t end) {
        if (!lie_alike(p, launch, true)) return fold_exactly<W>(p, view, begin, end);
        const char* const src = launch.multicast + (view.src[0] - launch.heaps[0]);
        char* const dst = launch.multicast + (view.dst[0] - launch.heaps[0]);
        p.begin_multicast();
        PYCOLL_ROLLED
        for (uint64_t i = begin + uint64_t{p.tid()} * 16; i < end;
             i += uint64_t{p.threads()} * 16) {
          p.template store_to_all<typename W::Element>(
              dst + i, p.template sum_of_all<typename W::Element>(src + i));
        }
        p.end_multicast();
      });
}

// The same of a rank's own block.
template <typename P>
PYCOLL_DEVICE void run_rank_multicast_copies(const P& p, const Launch& launch, uint32_t rank,
                                             uint32_t block) {
  run_rank_of_one_fold<With<Copier<P>, 1>, true>(
      p, launch, rank, block, [&](const FoldView& view, uint64_t begin, uint64_t end) {
        if (!lie_alike(p, launch, false)) {
          return Copier<P>::template range<16>(p, view, begin, end);
        }
        char* const dst = launch.multicast + (view.dst[0] - launch.heaps[0]);
        p.begin_multicast();
        PYCOLL_UNROLL_4
        for (uint64_t i = begin + uint64_t{p.tid()} * 16; i < end;
             i += uint64_t{p.threads()} * 16) {
          p.template store_to_all<float>(dst + i, p.template load<16>(view.src[0] + i));
        }
        p.end_multicast();
      });
}

}  // namespace pycoll::cuda
