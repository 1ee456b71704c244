// Who is left of a communicator: what its ranks agree on when some of them are gone.
//
// Agreement goes by rounds. A rank *comes* to a round by publishing its number; the round is
// decided, once for all, when every rank has come to it or is gone, and counts those that have
// come. Then each of them makes its part of the new communicator and *joins*. If one is gone before
// it has joined there is another round. Nobody who lives is ever left out, so nobody can write into
// the memory of those who go on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "control.h"

namespace pycoll {

// One rank's part in it. Ranks are gone when they have left or closed the communicator, or when
// their process has died and none of its threads runs any more. For one thread; the communicator
// has failed, and this rank has no call of it under way.
class Survivors {
 public:
  // Called in slices of the waits below; true gives up. It may throw, and so may they: then this
  // rank must leave the communicator, for the others may count on it.
  using Check = std::function<bool(Pulse)>;

  // `threads_as_ranks`: all ranks live in this process, so the life locks are not used.
  Survivors(std::shared_ptr<ControlSegment> control, uint32_t rank, bool threads_as_ranks);

  // Comes to the next round and waits until it is decided. `offer`: descriptor of fresh memory for
  // the new communicator, kept open until join() returns; that of the lowest rank is used.
  // Returns the ranks that are left, ascending; this one is among them. Empty if `check` gave up:
  // then this rank has not come, and may come again.
  std::vector<uint32_t> agree(int offer, const Check& check);

  // What a rank that is left has offered in the round: its process and the descriptor there.
  int32_t pid_of(uint32_t rank) const;
  int32_t offer_of(uint32_t rank) const;

  // Tells the others that this rank has joined, and waits for them. False: one of them is gone
  // without, and there is another round; what was made for this one is to be dropped. Throws
  // CollTimeout if `check` gave up.
  bool join(const Check& check);

  // Who has not come to the round that this rank gave up, and is not gone.
  std::vector<uint32_t> missing() const;

  // Waits for a rank to be gone, and tells whether it is.
  bool await_gone(uint32_t rank, const Check& check) const;

 private:
  bool gone(uint32_t rank) const;
  bool decided() const;
  bool settled() const;
  bool decide();
  bool withdraw();
  bool joined(uint32_t rank) const;
  bool out(uint32_t rank) const;

  std::shared_ptr<ControlSegment> control_;
  uint32_t rank_;
  bool threads_;
  uint64_t round_ = 0;
  std::vector<uint32_t> left_;
};

}  // namespace pycoll
