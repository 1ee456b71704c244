// A plan bound to numbers: everything of a call but its arrays.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/types.h"
#include "engine/packets.h"
#include "engine/plan.h"
#include "memory/control.h"

namespace pycoll {

// Where chunk c of rank r lies in an array, in elements.
enum class Layout : uint8_t {
  kFull = 0,   // at c * chunk: the array holds the whole vector
  kOwn = 1,    // at (c - r * m) * chunk: r holds chunks r * m .. (r + 1) * m - 1 only,
               // where m = chunks / world_size
  kTable = 2,  // at offset[r * chunks + c], length[r * chunks + c] long
};

struct PieceTable {
  std::vector<uint64_t> offset, length;  // elements; [world_size * chunks]
};

struct BoundCall;

// A plan with numbers: everything of a call but the arrays. Two calls match when descriptor, count
// and check are equal on all ranks; everything else here must follow from those.
struct Binding {
  std::shared_ptr<const Plan> plan;  // has passed Plan::check
  DType dtype = DType::kUInt8;       // of folds with more than one source
  ReduceOp op = ReduceOp::kSum;
  uint32_t elem_bytes = 1;  // itemsize(dtype) if the plan reduces; any if it only moves
  uint64_t count = 0;       // elements of the whole vector; goes into the flag line
  uint64_t chunk = 0;       // elements of a chunk; in kFull and kOwn chunk c covers
                            // [c * chunk, min((c + 1) * chunk, count)) of the vector
  uint64_t descriptor = 0;  // kind:8 dtype:8 op:8 flags:8 root:16 algorithm:16
  // Checksum of the algorithm, since algorithms of users may have equal numbers in the descriptor;
  // goes into the fingerprint.
  uint32_t check = 0;
  Layout in_layout = Layout::kFull, out_layout = Layout::kFull;
  PieceTable in_table, out_table;  // for kTable
  uint32_t scale_n = 0;            // kAvg: what complete folds divide by; 0: world_size
  bool scale_at_exit = false;      // kAvg: no fold divides; this rank's OUT is divided at the end
  // The plan is direct but the arrays are private: ranks copy from the arrays of others through the
  // kernel (single copy), and neither fold nor write there.
  bool across = false;
  // The plan is direct but only IN lies in the heap: peers do not touch OUT.
  bool input_only = false;
  // The same call with `across`; it runs instead where it is faster. Results are the same.
  std::shared_ptr<const BoundCall> alternative{};
};

// A Binding checked and cut into segments for the engines of one communicator. Immutable.
struct BoundCall : Binding {
  uint32_t fingerprint = 0;  // odd; 0 stands for a failed iteration
  uint32_t segments = 1;     // iterations per call
  uint64_t segment = 0;      // elements of a chunk per iteration
  uint64_t stride = 0;       // bytes between slots
  uint64_t largest = 0;      // elements of the largest chunk
  uint64_t in_bytes = 0;     // this rank's arrays must have at least these
  uint64_t out_bytes = 0;
  bool streams = false;          // the arrays of all ranks are 1.5 times the cache or more
  bool tiny = false;             // the slots lie in the flag line; messages: each fits one packet
  std::vector<uint32_t> team{};  // messages: the ranks that take part; empty: all
  bool agree = false;    // messages: a rank may not depend on all others, so they agree first
  PacketPlan packets{};  // messages: of a tiny call
};

// Where chunk k of an operand lies in the arrays of a rank, or in its slots.
struct PiecePlace {
  Buffer buffer;
  uint64_t at;      // bytes from its beginning
  uint64_t length;  // elements that it has there
};

// Of the elements [start, start + reach) of a chunk.
PiecePlace place_of(const BoundCall& call, const Operand& operand, uint32_t k, uint64_t start,
                    uint64_t reach);

// Mixes what must agree into 32 bits. Odd: 0 is the fingerprint of failed iterations.
uint32_t fingerprint_of(uint64_t cookie, uint64_t descriptor, uint64_t count, uint32_t check);

// Checks a Binding for `rank` of the communicator and cuts it into segments. Throws
// ScheduleError or ArgumentError.
std::shared_ptr<const BoundCall> bind_call(Binding binding, const Geometry& geometry,
                                           uint64_t cookie, uint32_t rank, uint32_t max_operands);

// Of a call that sends messages; the same on all ranks, but for `rank`: all cut it alike.
struct MessageLimits {
  uint32_t world_size = 1, rank = 0;
  uint64_t segment_bytes = 0;   // of a chunk that is sent at once
  uint64_t eager_bytes = 0;     // of a message that is copied into a packet
  uint64_t message_chunks = 0;  // of the longest message of any rank
  uint64_t slots = 0;           // of the rank that needs most of them, or about as many
};

// The same for a plan of messages, but for `packets`. Ranks that would cut a call into other
// messages than this one differ in `check`.
std::shared_ptr<BoundCall> bind_messages(Binding binding, const MessageLimits& limits, bool agree,
                                         std::vector<uint32_t> team);

}  // namespace pycoll
