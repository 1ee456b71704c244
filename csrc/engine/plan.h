// The packed form of one rank's program, as pycoll/schedule/lowering/compile.py writes it.
//
// A plan knows chunks, ranks and steps. It knows no bytes, no dtype and no collective: those are
// bound at call time (see Binding in engine.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace pycoll {

// The kinds of instruction.
enum class Opcode : uint8_t {
  kFold = 0,    // fold nsrc operands (from `arg` on) into the ndst operands that follow them
  kSignal = 1,  // publish step `arg`: everything before this instruction is visible to peers
  // wait until `peer` has published step >= `arg` (messages: until all requests are done)
  kWait = 2,
  kSend = 3,  // messages: send operand `arg` to `peer`
  kRecv = 4,  // messages: receive operand `arg` from `peer`
};

// Instr::flags
// combine along the in-order balanced tree, not left to right
inline constexpr uint8_t kFoldTree = 1;
// the result holds the contribution of every rank (scale of avg)
inline constexpr uint8_t kFoldComplete = 2;

enum class Buffer : uint16_t { kIn = 0, kOut = 1, kStaging = 2 };

// One piece of memory: chunk `chunk` of `buffer` on `rank`. For kStaging, `chunk` is a slot number.
struct Operand {
  uint16_t rank;
  uint16_t buffer;
  uint32_t chunk;
};
static_assert(sizeof(Operand) == 8);

// One instruction. A fold covers `count` consecutive chunks (slots) of each of its operands.
struct Instr {
  uint8_t op;
  uint8_t flags;
  uint16_t nsrc;
  uint16_t ndst;
  uint16_t peer;
  uint32_t arg;
  uint32_t count;
  uint32_t round;  // for messages only: the round of the schedule this belongs to
};
static_assert(sizeof(Instr) == 20);

// Peer of a WAIT of a plan of messages: everything under way.
inline constexpr uint16_t kAllPeers = 0xFFFF;

// One rank's plan. Its maker calls check(), once; see Binding.
struct Plan {
  std::vector<Instr> code;
  std::vector<Operand> operands;
  uint32_t world_size = 0;
  uint32_t rank = 0;
  uint32_t chunks = 1;    // chunks of the full vector
  uint32_t slots = 0;     // slots this plan uses in every rank's staging buffer
  uint32_t rounds = 0;    // rounds of the schedule
  bool direct = false;    // peers read and write the users' arrays in place
  bool messages = false;  // it sends and receives; otherwise it signals and waits
  // Set by check().
  bool reduces = false;  // some fold has more than one source
  bool rereads = false;  // ranks read OUT, so what they have stored, in the same call

  // Throws ScheduleError with the index of the bad instruction when an operand table index, rank,
  // buffer, chunk, slot or step is out of range, or a fold has no source or no destination, or
  // reads chunks that it also writes, other than each in its place.
  void check();
};

}  // namespace pycoll
