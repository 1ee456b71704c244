// What can be seen of a communicator from outside: its control segment, or the boards of its ranks,
// read while they run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/board.h"
#include "memory/control.h"

namespace pycoll {

// A call that a rank has made, or is in.
struct CallSight {
  uint64_t call_seq, iteration, descriptor, count;
  bool done;  // it returned without an error
  std::string site;
};

// A rank, as it was at some moment of the look at it: its owner writes meanwhile.
struct RankSight {
  Phase phase;
  int32_t pid;
  uint64_t starttime;         // of that process
  bool over;                  // the process is
  uint64_t call_seq;          // 0: no call so far
  int32_t waiting_peer;       // -1: none
  uint32_t waiting_position;  // that this one has to reach
  bool arrived;               // it has: the rank is about to go on
  uint64_t waiting_ns;
  MessageWay message_way;
  int32_t message_peer;  // or kAnyRank
  uint32_t message_tag;
  uint64_t message_ns;           // since when it waits for that
  uint32_t queued;               // calls in the background that have not begun
  std::string text;              // why it left
  std::vector<CallSight> calls;  // the newest, oldest first
};

// Reads what a rank has published, with its newest `calls` calls, fewer than kRecords.
RankSight look_at(const ControlSegment& control, uint32_t rank, uint32_t calls);
RankSight look_at(const Board& board, uint32_t calls);

}  // namespace pycoll
