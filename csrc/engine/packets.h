// The plan of a call over messages each of which fits one packet, with every address worked out
// beforehand: such a call takes as long as its instructions.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/fold/fold.h"

namespace pycoll {

struct BoundCall;

struct PacketPlan {
  // kPacket: the data of the packet that has come from `peer` and is kept.
  enum class Where : uint8_t { kIn, kOut, kCells, kPacket };
  struct Piece {
    Where where;
    uint16_t peer;
    uint32_t place;  // in the packet that it is sent or received in
    uint64_t at;     // bytes into the array, the cells or the packet
    uint64_t nbytes;
  };
  enum class Op : uint8_t {
    kSend,     // a packet of these pieces
    kReceive,  // a packet of these pieces, or one that is kept where it is until released
    kRelease,  // the packet of a peer
    kCopy,     // the first piece to all others
    kFold,     // the first `sources` pieces to all others
    kScale,    // a piece of the result, where this rank has one, by the ranks
  };
  struct Step {
    Op op;
    uint16_t peer;
    uint32_t round;          // of the schedule
    uint32_t first, pieces;  // of the plan's pieces
    uint32_t least, most;    // kReceive: bytes that the packet may have; kSend: `most` it has
    uint32_t together;       // kReceive: this one and those behind it that are awaited at once
    bool kept;               // kReceive: the packet
    uint32_t sources;        // kFold
    uint64_t count;          // kFold: elements; kCopy: bytes
    FoldSpec spec;           // kFold
  };

  std::vector<Step> steps;
  std::vector<Piece> pieces;
  uint32_t most_pieces = 0;  // of a step
  // Between two ranks that must agree: whether a packet tells the other one, or this one, that its
  // sender has made the call.
  bool tells = false, hears = false;
  uint32_t other = 0;
};

// `call` is one of messages, bound, and tiny.
PacketPlan plan_packets(const BoundCall& call, uint32_t world_size);

}  // namespace pycoll
