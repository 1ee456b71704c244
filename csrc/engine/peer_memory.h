// Reading the private memory of other ranks of this host: "cross-memory attach".
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pycoll {

class ControlSegment;

// Copies nbytes at `from`, an address of process `pid`, to `to`. False if the kernel refuses:
// there is no such process or no such memory, or it is forbidden (Yama, a container). Part of the
// bytes may have been copied then. Linux only; elsewhere always false.
bool read_process(int32_t pid, void* to, const void* from, uint64_t nbytes);

// The memory of the other ranks of a communicator as one rank reads it. Not thread-safe.
class PeerMemory {
 public:
  // Shows the peers a word by which they find out whether they can read this rank's memory.
  PeerMemory(std::shared_ptr<ControlSegment> control, uint32_t rank);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // False once it is known that some peer's memory cannot be read.
  bool able() const { return able_; }
  // Finds it out, once. Every peer must have made its PeerMemory.
  void probe();
  // Whether the memory of one peer, which has made its PeerMemory, can be read. For any thread.
  static bool reaches(ControlSegment& control, uint32_t peer);

  bool read(uint32_t peer, void* to, const void* from, uint64_t nbytes) const;

  // Where peers can read an array of this rank until the next readable_address(): where it lies, or
  // in a copy if the kernel reads nothing there (memory of devices, memfd_secret). Where it has
  // read once it is not asked again: if other memory is there by then, read() fails.
  const void* readable_address(const void* array, uint64_t nbytes);

 private:
  struct Stretch {
    const void* array = nullptr;
    uint64_t nbytes = 0;
    bool operator==(const Stretch&) const = default;
  };
  static constexpr size_t kStretches = 256;  // direct-mapped

  std::shared_ptr<ControlSegment> control_;
  uint32_t rank_;
  uint64_t word_;  // what peers read; only ranks of this communicator know it
  bool able_ = true, probed_ = false;
  std::vector<char> copy_;
  std::array<Stretch, kStretches> readable_;  // where the kernel has read
};

}  // namespace pycoll
