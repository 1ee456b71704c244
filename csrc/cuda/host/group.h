// Groups of ranks and their calls: what pycoll_cuda.h offers, without CUDA in it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cuda/host/machine.h"
#include "cuda/host/pycoll_cuda_messages.h"
#include "cuda/host/pycoll_cuda_norm.h"
#include "cuda/kernels/kernels.h"
#include "engine/bind.h"

namespace pycoll::cuda {

// What a rank sends to all others together, up to which the low-latency protocol is chosen.
inline constexpr uint64_t kLowLatencyBytes = 256 << 10;
// Data that one rank can send to one other in a low-latency call.
inline uint64_t packet_data(uint32_t n) { return packet_slot(n) / kPacketBytes * kPacketData; }

// Memory of a group or a call, given back with it, also where making that fails.
struct GiveBack {
  void operator()(void* memory) const;
  void operator()(Record* records) const;
};
using DeviceMemory = std::unique_ptr<void, GiveBack>;

}  // namespace pycoll::cuda

struct PycollCudaGroup {
 public:
  // rank < 0: a virtual group. Otherwise this process's end of a peer group.
  PycollCudaGroup(int device, int rank, int world_size, int max_blocks, uint64_t key);
  ~PycollCudaGroup();
  PycollCudaGroup(const PycollCudaGroup&) = delete;

  bool is_virtual() const { return rank_ < 0; }
  int device() const { return device_; }
  uint32_t world_size() const { return world_size_; }
  uint32_t max_blocks() const { return max_blocks_; }
  uint64_t key() const { return key_; }
  uint64_t cell_bytes() const { return cell_bytes_; }
  // Data that one rank can send to one other in a low-latency call.
  uint64_t packet_bytes() const { return pycoll::cuda::packet_data(world_size_); }
  // Ranks whose blocks this process launches: the first, and how many.
  uint32_t first_rank() const { return is_virtual() ? 0 : static_cast<uint32_t>(rank_); }
  uint32_t ranks() const { return is_virtual() ? world_size_ : 1; }
  // Ranks whose blocks have to fit on this device at once, those of other processes included.
  uint32_t ranks_on_device() const { return is_virtual() ? world_size_ : share_; }
  bool aborted() const { return aborted_.load(); }

  void* control() const;
  void set_share(int ranks);
  void set_multicast(void* address);
  bool has_multicast() const { return multicast_ != nullptr; }
  void connect(void* const* controls, void* const* heaps, uint64_t heap_bytes, void* const* cells,
               uint64_t cell_bytes);
  PycollCudaError error(int rank) const;
  bool failed() const;
  void abort();
  void reset();
  void set_epoch(uint32_t epoch);

  // Fills in where memory of ranks is. Throws if peers are not connected.
  void place(pycoll::cuda::Launch& launch) const;
  // Throws unless an array of a direct plan lies in this rank's heap.
  void check_in_heap(const void* array, uint64_t nbytes, const char* name) const;
  // Where something lies in the heap of a rank, as mapped here. Throws unless all of it does.
  const char* in_heap_of(int rank, uint64_t offset, uint64_t nbytes) const;
  char* control_of(int rank) const { return controls_[rank]; }

 private:
  pycoll::cuda::Record& record(int rank) const;

  int device_, rank_;
  uint32_t world_size_, max_blocks_, share_ = 1;
  uint64_t key_;
  std::vector<pycoll::cuda::DeviceMemory> own_controls_;                     // [ranks()]
  std::unique_ptr<pycoll::cuda::Record, pycoll::cuda::GiveBack> records_{};  // [ranks()], of hosts
  char* controls_[pycoll::cuda::kMaxRanks] = {};
  char* heaps_[pycoll::cuda::kMaxRanks] = {};
  char* cells_[pycoll::cuda::kMaxRanks] = {};
  char* multicast_ = nullptr;
  uint64_t heap_bytes_ = 0, cell_bytes_ = 0;
  bool connected_ = false;
  std::atomic<bool> aborted_{false};
};

namespace pycoll::cuda {

// Instructions that are one fold of all inputs in rank order, between "all have entered" and "all
// have left"; see direct.h. `copies`: of one's own input alone, into everybody's output.
struct OneFold {
  bool found = false, tree = false, push = false, own_chunk = false, copies = false;
  bool operator==(const OneFold&) const = default;
};

}  // namespace pycoll::cuda

struct PycollCudaCall {
 public:
  PycollCudaCall(PycollCudaGroup& group, const PycollCudaCallSpec* specs, int nspecs);
  ~PycollCudaCall();
  PycollCudaCall(const PycollCudaCall&) = delete;

  PycollCudaCallInfo info(int method) const;
  PycollCudaProgram program(int rank) const;
  void launch(const void* const* in, void* const* out, int nblocks, int nthreads, int method,
              uint64_t timeout_ns, uint64_t absent, void* stream) const;

 private:
  void upload();
  // What packets of plans that only copy do.
  struct Moved {
    pycoll::cuda::Moves moves = pycoll::cuda::Moves::kNone;
    uint32_t root = 0;  // of kSpread
  };
  uint64_t packet_bytes(const PycollCudaCallSpec* specs, pycoll::cuda::OneFold whole) const;
  uint64_t packet_bytes(Moved moved) const;
  Moved moved(const PycollCudaCallSpec* specs) const;
  PycollCudaMethod choose(int method) const;
  // Throws unless copy engines can make the call.
  void check_copies() const;
  void launch_copies(const void* const* in, void* const* out, uint64_t timeout_ns,
                     void* stream) const;
  void copy_all(const pycoll::BoundCall& call, const void* const* in, void* const* out,
                void* stream) const;
  const void* kernel(int method) const;
  const void* multicast_kernel() const;
  int default_threads(int method) const;
  int default_blocks(int method, int threads) const;

  PycollCudaGroup& group_;
  std::vector<std::shared_ptr<const pycoll::BoundCall>> bound_;  // [group.ranks()]
  pycoll::cuda::Shape shape_{};
  const pycoll::cuda::KernelSet* kernels_ = nullptr;
  std::string text_;      // "f32 sum"
  bool special_ = false;  // one fold, with kernels of its own
  // For the low-latency protocol: what a rank sends to each other one; 0: the call is none for it.
  uint64_t sent_bytes_ = 0;
  Moved moved_;
  bool tree_ = false, push_ = false, own_chunk_ = false, copies_ = false;
  std::vector<PycollCudaProgram> programs_;  // [group.ranks()], device addresses
  pycoll::cuda::DeviceMemory memory_;        // programs, then code, operands and tables
};

namespace pycoll::cuda {

inline constexpr uint64_t kDefaultTimeoutNs = 60'000'000'000;
inline constexpr uint32_t kCopiesFingerprint = 0xC0B1E5u << 1;  // ranks with kernels do not match

OneFold recognise(const BoundCall& call);

// Checks a spec and gives it numbers, as Engine::bind does for ranks in shared memory.
std::shared_ptr<const BoundCall> bind_spec(const PycollCudaCallSpec& spec, uint32_t world_size,
                                           uint32_t rank, uint64_t key, uint64_t cell_bytes);

// Kernels for an operation; `moves`: nothing is combined.
const KernelSet& kernels_for(DType dtype, ReduceOp op, bool moves);
const char* dtype_name(DType dtype);
const char* op_name(ReduceOp op);

// See pycoll_cuda_rms_norm.
void launch_norm(const PycollCudaGroup& group, const PycollCudaNorm& norm, int nblocks,
                 int nthreads, uint64_t timeout_ns, uint64_t absent, void* stream);

// See pycoll_cuda_send, pycoll_cuda_receive and pycoll_cuda_message_taken.
void launch_message(const PycollCudaGroup& group, const PycollCudaMessage& message, bool receives,
                    int nblocks, int nthreads, uint64_t timeout_ns, void* stream);
bool is_taken(const PycollCudaGroup& group, const PycollCudaMessage& send);
// See pycoll_cuda_message_parts.
uint64_t message_parts(uint32_t n, uint64_t nbytes, bool slotted);

}  // namespace pycoll::cuda
