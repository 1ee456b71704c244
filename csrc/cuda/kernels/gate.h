// What stands before and behind copies that a stream makes without kernels: one block of a rank
// that lets them begin when all ranks have entered the call, and ends the call when all have made
// theirs. Between the two only the stream orders anything.
//
// If a rank gives up in the first, the copies are made all the same, as they are on the stream;
// they read arrays of peers and write this rank's own, which are undefined then. The second sees
// the abort word and leaves.
#pragma once

#include "cuda/kernels/signals.h"

namespace pycoll::cuda {

template <typename P>
PYCOLL_DEVICE void run_gate(const P& p, const Launch& launch, uint32_t rank) {
  Member<P> m(p, launch, rank, 0);
  if (!m.enter()) return;
  if (launch.gate == Gate::kBegin) {
    m.signal(kEntered);
    (void)m.await_all(kEntered, 0);
  } else {
    m.signal(kDone);
    if (m.await_all(kDone, 1)) m.finish();
  }
}

}  // namespace pycoll::cuda
