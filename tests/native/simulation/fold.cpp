// The folds of the simulation: sums of int64, slowly, so that what overlaps shows.
#include "kernels/fold/fold.h"

#include "machine.h"

namespace pycoll {

void fold(const FoldSpec& spec, const void* const* srcs, int nsrc, void* const* dsts, int ndst,
          size_t count) {
  const size_t nbytes = count * itemsize(spec.dtype);
  if (nsrc == 1) return copy_to_all(dsts, ndst, srcs[0], nbytes, false);
  if (spec.dtype != DType::kInt64 || spec.op != ReduceOp::kSum) std::abort();
  std::vector<int64_t> sum(count, 0);
  for (int s = 0; s < nsrc; ++s) {
    simulation::note_read(srcs[s], nbytes);
    for (size_t i = 0; i < count; ++i) sum[i] += static_cast<const int64_t*>(srcs[s])[i];
    simulation::pause();
  }
  for (int d = 0; d < ndst; ++d) {
    simulation::note_write(dsts[d], nbytes);
    __builtin_memcpy(dsts[d], sum.data(), nbytes);
    simulation::pause();
  }
}

void copy(void* dst, const void* src, size_t nbytes, bool) {
  simulation::pause();
  simulation::note_read(src, nbytes);
  simulation::note_write(dst, nbytes);
  __builtin_memcpy(dst, src, nbytes);
}

void copy_to_all(void* const* dsts, int ndst, const void* src, size_t nbytes, bool) {
  for (int d = 0; d < ndst; ++d) {
    if (dsts[d] != src) copy(dsts[d], src, nbytes);
  }
}

void scale(DType, void*, size_t, uint32_t) { std::abort(); }
bool slow_for_strings(const void*, const void*) { return false; }
const char* isa_name() { return "simulated"; }
bool force_isa(const char*) { return false; }

}  // namespace pycoll
