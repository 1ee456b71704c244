// What the host hands to kernels: memory of ranks, numbers of a call, and the error record.
#pragma once

#include "cuda/kernels/fold.h"
#include "cuda/kernels/primitives.h"
#include "engine/plan.h"

namespace pycoll::cuda {

inline constexpr uint32_t kMaxBlocks = 256;       // PYCOLL_CUDA_MAX_BLOCKS
inline constexpr uint32_t kOutside = 0xFFFFFFFF;  // of the plan: PycollCudaError::instruction

// Flags of blocks that take no part in calls are renewed when the epoch passes a multiple of this,
// long before they could be mistaken for newer ones (after 2^15 epochs).
inline constexpr uint32_t kRenewEvery = 4096;

// Packets of low-latency calls; see low_latency.h.
inline constexpr uint32_t kPacketBytes = 16, kPacketData = 8;
inline constexpr uint64_t kPacketMemory = uint64_t{2} << 20;  // of a rank, about
inline constexpr uint64_t kRenewPackets = uint64_t{1} << 30;  // calls, far fewer than 2^32

// Why a rank gave up; PycollCudaErrorKind.
enum class Fault : uint32_t { kNone = 0, kTimeout = 1, kAborted = 2, kMismatch = 3, kFollowed = 4 };

// What a rank tells its peers about a call, before it says "entered": PeerGroups only.
struct Card {
  uint64_t in, out;      // bytes from the start of the rank's heap
  uint32_t fingerprint;  // of the call
  uint32_t reserved[3];
};
static_assert(sizeof(Card) == 32);

// Head of the control memory of a rank. Behind it lie flags[block][rank], cards[block][rank], and
// the packets of low-latency calls: slots[2][rank] and headers[2][rank]; all are written by rank
// `rank` and read by this one.
struct alignas(128) Control {
  uint32_t abort;    // not 0: leave; written by anybody
  uint32_t claimed;  // the error record is taken
  uint32_t epoch;    // of the next iteration, modulo 2^16; written by the last block of a call
  uint32_t done;     // blocks that have finished the running call
  // Low-latency calls so far, times kMaxBlocks: the blocks of a call add that much together. They
  // read it before, so until the last one has added, the quotient is the same.
  uint64_t packet_calls;
  uint32_t reserved[26];
  uint32_t finished[kMaxRanks];  // [rank]: position of its next iteration, when a call is over
};

PYCOLL_BOTH uint64_t flags_offset() { return sizeof(Control); }
PYCOLL_BOTH uint64_t cards_offset(uint32_t n, uint32_t max_blocks) {
  return (sizeof(Control) + uint64_t{n} * max_blocks * sizeof(uint32_t) + 127) / 128 * 128;
}
PYCOLL_BOTH uint64_t packets_offset(uint32_t n, uint32_t max_blocks) {
  return cards_offset(n, max_blocks) + uint64_t{n} * max_blocks * sizeof(Card);
}
// Bytes of a slot: what one rank can send to one other in a low-latency call.
PYCOLL_BOTH uint64_t packet_slot(uint32_t n) {
  return n < 2 ? 0 : kPacketMemory / (2 * n) / kPacketBytes * kPacketBytes;
}
PYCOLL_BOTH uint64_t control_bytes(uint32_t n, uint32_t max_blocks) {
  return packets_offset(n, max_blocks) + 2 * n * (packet_slot(n) + kPacketBytes);
}

// Host memory of a rank that kernels write and poll: PycollCudaError, and the host's abort word.
struct alignas(64) Record {
  uint32_t kind;  // written last
  uint32_t rank, peer, block, step, expected, seen, instruction;
  uint64_t waited_ns, reserved;
  uint32_t abort;  // written by the host: leave
};
static_assert(sizeof(Record) == 64);

// One rank's plan in device memory.
struct Program {
  const Instr* code;
  const Operand* operands;
  uint32_t size;  // instructions
  uint32_t reserved;
};

// Offsets and lengths of chunks on ranks, in elements: [world_size * chunks], in device memory.
struct Table {
  const uint64_t* offset;
  const uint64_t* length;
};

// The numbers of a call, the same on all ranks; see BoundCall in bind.h for most.
struct Shape {
  uint64_t count, chunk, segment, stride, largest;
  uint32_t segments;
  uint32_t chunks, slots;
  uint32_t elem_bytes;
  uint8_t layout_in, layout_out, scale_at_exit, is_signed;
  uint32_t scale_n;  // 0: nothing divides
  Table in_table, out_table;
};

// Which side of copies a gate stands on; see gate.h.
enum class Gate : uint32_t { kNone = 0, kBegin = 1, kEnd = 2 };

// What plans that only copy do in packets, if they do one of these: every rank gets the blocks of
// all, a block of each, or the root's vector. See low_latency_moves.h.
enum class Moves : uint32_t { kNone = 0, kGather = 1, kTranspose = 2, kSpread = 3 };

// Parameters of a launch. Arrays are indexed by rank.
struct Launch {
  Shape shape;
  uint32_t world_size, nblocks, max_blocks;
  uint32_t first_rank;   // rank of block 0 of the grid
  uint32_t exchange;     // ranks are separate launches: they tell each other their arrays
  uint32_t fingerprint;  // of the call
  uint32_t tree;         // for the kernels of one fold: in tree order
  uint32_t push;         // likewise: into everybody's array, not one's own
  uint32_t own_chunk;    // likewise: the chunk of one's own rank, not chunk 0
  Moves moves;           // for packets of plans that only copy
  uint32_t root;         // likewise: of kSpread
  uint64_t slice;        // elements of a chunk that a block owns, see slice_of
  uint64_t timeout_ns;
  uint64_t absent;          // ranks that leave at once, for tests
  const Program* programs;  // [ranks of this launch]
  char* in[kMaxRanks];      // of the ranks of this launch, from first_rank on
  char* out[kMaxRanks];
  char* control[kMaxRanks];
  char* cells[kMaxRanks];  // 2 * cell_bytes each
  char* heaps[kMaxRanks];
  Record* records[kMaxRanks];  // of the ranks of this launch
  char* multicast;             // address that stands for all heaps; null: there is none
  Gate gate;
  uint64_t cell_bytes;
  uint64_t packets;  // packets_offset
  uint64_t slot;     // packet_slot
};

// Block b of a rank owns elements [b * slice, (b + 1) * slice) of every chunk, on every rank, in
// every segment and every buffer: whoever depends on what it does is the same block of a peer.
// A slice is a multiple of 128 bytes where whole elements allow it.
PYCOLL_BOTH uint64_t slice_of(uint64_t segment, uint32_t elem_bytes, uint32_t nblocks) {
  const uint64_t unit = 128 % elem_bytes == 0 ? 128 / elem_bytes : 128;
  const uint64_t share = (segment + nblocks - 1) / nblocks;
  return (share + unit - 1) / unit * unit;
}

// Memory of a block.
struct Shared {
  char* in[kMaxRanks];  // arrays of all ranks, as far as they are known
  char* out[kMaxRanks];
  bool met[kMaxRanks];  // has sent its arrays
  const char* src[kMaxRanks];
  char* dst[kMaxRanks];
  uint64_t extent[2 * kMaxRanks];  // elements that each operand has here
  Operand piece;                   // what a division at the end divides
  uint32_t last;                   // this block is the last one of its rank
};

}  // namespace pycoll::cuda
