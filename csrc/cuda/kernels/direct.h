// Plans that are one fold of all ranks' inputs, written by hand: one shot (every rank folds what it
// needs into its own array) and two shots by pushing (every rank folds its chunk and stores it in
// everybody's array).
//
// They run only plans whose instructions say exactly that (see recognise in binding.cpp), with the
// same steps, flags and order of sources as the interpreter, so a proof of the plan is a proof of
// what happens here.
#pragma once

#include "cuda/kernels/interpreter.h"

namespace pycoll::cuda {

template <typename W, typename P>
PYCOLL_DEVICE void fold_exactly(const P& p, const FoldView& view, uint64_t begin, uint64_t end) {
  using F = typename W::Fold;
  switch (view.nsrc) {
    case 2:
      return F::template exact<2, false>(p, view, begin, end);
    case 4:
      if (view.tree) return F::template exact<4, true>(p, view, begin, end);
      return F::template exact<4, false>(p, view, begin, end);
    case 8:
      if (view.tree) return F::template exact<8, true>(p, view, begin, end);
      return F::template exact<8, false>(p, view, begin, end);
    default:
      return F::template range<16>(p, view, begin, end);
  }
}

// One block of one rank; `packs` folds whole packs of what the table of the block holds. kCopies:
// the fold has one source, this rank's own input.
template <typename W, bool kCopies = false, typename P, typename Packs>
PYCOLL_DEVICE void run_rank_of_one_fold(const P& p, const Launch& launch, uint32_t rank,
                                        uint32_t block, Packs packs) {
  if (launch.absent >> rank & 1) return;
  Member<P> m(p, launch, rank, block);
  if (!m.enter()) return;
  const uint32_t n = launch.world_size;
  m.signal(kEntered, false);
  if (!m.await_all(kEntered, 1)) return;
  Pieces<P> pieces(m);
  const uint32_t chunk = launch.own_chunk ? rank : 0;
  const uint32_t nsrc = kCopies ? 1 : n, ndst = launch.push ? n : 1;
  for (uint32_t t = p.tid(); t < nsrc + ndst; t += p.threads()) {
    const bool source = t < nsrc;
    const uint32_t i = source ? t : t - nsrc;
    const Buffer buffer = source ? Buffer::kIn : Buffer::kOut;
    const bool own = source ? kCopies : launch.push == 0;
    const auto holder = static_cast<uint16_t>(own ? rank : i);
    pieces.place({holder, static_cast<uint16_t>(buffer), chunk}, 0, t, nsrc);
  }
  p.barrier();
  const FoldView view{
      p.shared().src, p.shared().dst,   nsrc,
      ndst,           launch.tree != 0, {launch.shape.scale_n, launch.shape.is_signed != 0}};
  pieces.template run<W>(view, [&](uint64_t begin, uint64_t end) { packs(view, begin, end); });
  m.signal(kDone);
  if (!m.await_all(kDone, n + 2)) return;
  m.finish();
}

template <typename W, typename P>
PYCOLL_DEVICE void run_rank_direct(const P& p, const Launch& launch, uint32_t rank,
                                   uint32_t block) {
  run_rank_of_one_fold<W>(p, launch, rank, block,
                          [&](const FoldView& view, uint64_t begin, uint64_t end) {
                            fold_exactly<W>(p, view, begin, end);
                          });
}

}  // namespace pycoll::cuda
