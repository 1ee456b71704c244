// What tests can choose about launches and memory on the host.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

// How launches run from now on. seed < 0: lanes are threads. Otherwise lanes are fibers of one
// thread, and a generator with this seed decides after every access which one goes on. The clock
// of fibers stands still while any of them gets on, so waits time out exactly when all wait.
__attribute__((visibility("default"))) void pycoll_host_schedule(int64_t seed);

// What devices say that they support from now on, as PycollCudaSupport, 1 at the beginning; and
// whether memory of a descriptor, or of a fabric handle, may be mapped.
__attribute__((visibility("default"))) void pycoll_host_vmm(int bits, int descriptors, int fabric);

// Returns how many pieces of memory have been allocated and not been freed. Before the next one
// that is refused there are so many that are not; negative: none is refused.
__attribute__((visibility("default"))) int pycoll_host_allocated(int until_refused);

// Accesses that have been made under schedulers so far.
__attribute__((visibility("default"))) uint64_t pycoll_host_turns(void);

// Writes what ranges have begun and ended since the last call, a line each, and returns its size;
// what finds no room is lost.
__attribute__((visibility("default"))) size_t pycoll_host_ranges(char* to, size_t nbytes);

// Loads and stores so far that a device would have refused, as they were not aligned.
__attribute__((visibility("default"))) uint64_t pycoll_host_misaligned(void);
}
