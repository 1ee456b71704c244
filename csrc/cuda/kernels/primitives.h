// What device code may do to memory that other blocks and ranks touch. Everything above this file
// is a template over a policy with these members, so the same bodies run as CUDA kernels (with
// DevicePolicy) and as host code under a thread sanitizer or a scheduler of interleavings (with the
// policies of tests/cuda).
//
// A policy P is one thread of a block:
//   uint32_t tid(), threads()        its number in the block, and how many there are
//   Shared& shared()                 memory of the block
//   void barrier()                   of the block; orders memory accesses of all its threads
//   bool any(bool)                   the same, and whether any thread passed true
//   uint32_t load_acquire(const uint32_t*), load_relaxed(const uint32_t*)
//   uint64_t load_relaxed(const uint64_t*)
//   void store_release(uint32_t*, uint32_t, Reach = kSystem), store_relaxed(uint32_t*, uint32_t)
//   uint32_t add(uint32_t*, uint32_t, Reach)       acquires and releases; returns the old value
//   bool claim(uint32_t*)                          0 -> 1; true for the one who did it
//   void count(uint64_t*, uint64_t)                adds, relaxed, for threads of one device
//   Raw<B> load<B>(const char*), void store<B>(char*, Raw<B>)   B bytes, aligned to B; plain
//   Packet load_packet(const char*), void store_packet(char*, Packet)   relaxed, aligned to 16
//   uint64_t clock_ns(), void backoff(uint32_t spins)
//   float half_to_float(uint16_t), uint16_t float_to_half(float)   exact; to nearest even
//
// Memory model (PTX ISA, section "Memory consistency model"). Data is written by plain stores of
// any thread of a block; barrier() makes them happen before the store_release.sys of a flag by a
// thread of that block; a load_acquire.sys that sees the flag, and the barrier() behind it, order
// them before the plain loads of every thread of the waiting block. Flags are whole 32-bit words
// with one writer each; the scopes of both sides include the other side, so the accesses are
// morally strong wherever the two ranks run: in one kernel, in two processes, on two devices. A
// fence of system scope waits for more than one of the device, so ranks of one kernel do without.
//
// A vector access is, to the model, one access for each of its elements, in any order. A packet is
// two elements of 64 bits: a half is seen as a whole, but one half may be seen without the other.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define PYCOLL_DEVICE __device__ __forceinline__
#define PYCOLL_BOTH __host__ __device__ __forceinline__
#define PYCOLL_UNROLL _Pragma("unroll")
#define PYCOLL_UNROLL_4 _Pragma("unroll 4")
#define PYCOLL_ROLLED _Pragma("unroll 1")
#else
#define PYCOLL_DEVICE inline
#define PYCOLL_BOTH inline
#define PYCOLL_UNROLL
#define PYCOLL_UNROLL_4
#define PYCOLL_ROLLED
#endif

namespace pycoll::cuda {

// How far a release reaches: threads of this device in this kernel, or all.
enum class Reach { kDevice, kSystem };

// So many bytes, moved at once.
template <int kBytes>
struct Raw;
template <>
struct Raw<1> {
  uint8_t w[1];
};
template <>
struct Raw<2> {
  uint16_t w[1];
};
template <>
struct Raw<4> {
  uint32_t w[1];
};
template <>
struct Raw<8> {
  uint64_t w[1];
};
template <>
struct alignas(16) Raw<16> {
  uint32_t w[4];
};

struct Packet {
  uint64_t half[2];
};

// ---- positions ---------------------------------------------------------------------------------

// A position is epoch << 16 | step: a 32-bit number that only grows, modulo 2^32. Two positions
// that are compared are less than 2^15 epochs apart.
PYCOLL_BOTH uint32_t position_of(uint32_t epoch, uint32_t step) { return epoch << 16 | step; }
PYCOLL_BOTH bool reached(uint32_t position, uint32_t wanted) {
  return static_cast<int32_t>(position - wanted) >= 0;
}

#if defined(__CUDACC__)

struct Shared;

// One thread of a CUDA block.
class DevicePolicy {
 public:
  __device__ explicit DevicePolicy(Shared& shared) : shared_(shared) {}

  PYCOLL_DEVICE uint32_t tid() const { return threadIdx.x; }
  PYCOLL_DEVICE uint32_t threads() const { return blockDim.x; }
  PYCOLL_DEVICE Shared& shared() const { return shared_; }
  PYCOLL_DEVICE void barrier() const { __syncthreads(); }
  PYCOLL_DEVICE bool any(bool mine) const { return __syncthreads_or(mine) != 0; }

  PYCOLL_DEVICE uint32_t load_acquire(const uint32_t* p) const {
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
  }
  PYCOLL_DEVICE uint32_t load_relaxed(const uint32_t* p) const {
    uint32_t value;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
  }
  PYCOLL_DEVICE uint64_t load_relaxed(const uint64_t* p) const {
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
  }
  PYCOLL_DEVICE void store_release(uint32_t* p, uint32_t value,
                                   Reach reach = Reach::kSystem) const {
    if (reach == Reach::kDevice) {
      asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
    } else {
      asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
    }
  }
  PYCOLL_DEVICE void store_relaxed(uint32_t* p, uint32_t value) const {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
  }
  PYCOLL_DEVICE uint32_t add(uint32_t* p, uint32_t value, Reach reach) const {
    uint32_t old;
    if (reach == Reach::kDevice) {
      asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;"
                   : "=r"(old)
                   : "l"(p), "r"(value)
                   : "memory");
    } else {
      asm volatile("atom.acq_rel.sys.add.u32 %0, [%1], %2;"
                   : "=r"(old)
                   : "l"(p), "r"(value)
                   : "memory");
    }
    return old;
  }
  PYCOLL_DEVICE bool claim(uint32_t* p) const {
    uint32_t old;
    asm volatile("atom.acq_rel.sys.cas.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(p) : "memory");
    return old == 0;
  }
  PYCOLL_DEVICE void count(uint64_t* p, uint64_t value) const {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
  }

  // Plain accesses: never through the read-only path, which acquires do not refresh.
  template <int kBytes>
  PYCOLL_DEVICE Raw<kBytes> load(const char* p) const {
    __builtin_assume(__isGlobal(p));
    if constexpr (kBytes == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      return {{v.x, v.y, v.z, v.w}};
    } else {
      return *reinterpret_cast<const Raw<kBytes>*>(p);
    }
  }
  template <int kBytes>
  PYCOLL_DEVICE void store(char* p, const Raw<kBytes>& raw) const {
    __builtin_assume(__isGlobal(p));
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(p) = make_uint4(raw.w[0], raw.w[1], raw.w[2], raw.w[3]);
    } else {
      *reinterpret_cast<Raw<kBytes>*>(p) = raw;
    }
  }

  PYCOLL_DEVICE Packet load_packet(const char* p) const {
    Packet packet;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(packet.half[0]), "=l"(packet.half[1])
                 : "l"(p)
                 : "memory");
    return packet;
  }
  PYCOLL_DEVICE void store_packet(char* p, const Packet& packet) const {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(packet.half[0]),
                 "l"(packet.half[1])
                 : "memory");
  }

  PYCOLL_DEVICE uint64_t clock_ns() const {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  PYCOLL_DEVICE void backoff(uint32_t spins) const {
    if (spins > 256) __nanosleep(100);
  }

  PYCOLL_DEVICE float half_to_float(uint16_t bits) const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  PYCOLL_DEVICE uint16_t float_to_half(float value) const {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }

 private:
  Shared& shared_;
};

#endif

}  // namespace pycoll::cuda
