// Pages of shared memory that are there when they are touched, and how many there can be.
#pragma once

#include <cstdint>
#include <string>

namespace pycoll {

// The bytes that this process may still be given: what the machine has available, and what the
// limits of its control groups (a container's, say, of either version) leave, file caches being
// given up first. Reads the kernel's files below `root`. UINT64_MAX without them.
uint64_t available_memory(const std::string& root = "");

// Allocates the pages [offset, offset + nbytes) of a memfd. Throws Error(kind) naming the bytes
// wanted and `fix` when the machine, or the container, does not have them.
void reserve_pages(int fd, uint64_t offset, uint64_t nbytes, const char* kind, const char* fix);

}  // namespace pycoll
