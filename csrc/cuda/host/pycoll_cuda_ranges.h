// C interface of libpycoll_cuda.so, continued: ranges of NVTX, which profilers such as Nsight
// Systems show beside what runs on a device.
//
// They need neither driver nor device. Without a profiler a range costs nanoseconds. Ranges of one
// thread nest; all of them lie in the domain "pycoll".
#pragma once

#include "cuda/host/pycoll_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Begins a range of the calling thread.
PYCOLL_CUDA_API void pycoll_cuda_range_begin(const char* name);
// Ends the newest range of the calling thread that has not ended.
PYCOLL_CUDA_API void pycoll_cuda_range_end(void);

// Names of the kinds of calls, by number; before the first range of a call.
PYCOLL_CUDA_API void pycoll_cuda_range_names(const char* const* names, int count);
// Begins a range for a call: `descriptor` has its kind in the lowest 8 bits, and the number of
// elements becomes the payload of the range. As Marks of csrc/engine/trace.h.
PYCOLL_CUDA_API void pycoll_cuda_range_begin_call(uint64_t descriptor, uint64_t count);

#ifdef __cplusplus
}
#endif
