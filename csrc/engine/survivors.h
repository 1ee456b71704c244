// Which ranks of a communicator are left: they agree on it when some of them are gone.
//
// Agreement goes by rounds. A rank *comes* to a round by publishing its number; the round is
// decided, once for all, when every rank has come to it or is gone, and counts those that have
// come. Then each of them makes its part of the new communicator and *joins*. If one of them can no
// longer join there is another round. No living rank is ever left out, so none can write into
// the memory of those that go on; and a rank that gives up waiting can go on with it later.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "memory/control.h"

namespace pycoll {

// How a round has ended so far.
enum class Round { kJoined, kAnother, kLate };

// The part of one rank. Ranks are gone when they have left or closed the communicator, or when
// their process has died and none of its threads runs any more. For the thread that holds the
// engine of this rank, which has no call under way; the communicator has failed.
class Survivors {
 public:
  // Called in slices of the waits below; true gives up. It may throw, and so may they: then this
  // rank must leave the communicator, for the others may count on it.
  using Check = std::function<bool(Pulse)>;

  // `threads_as_ranks`: all ranks live in this process, so the liveness locks are not used.
  Survivors(std::shared_ptr<ControlSegment> control, uint32_t rank, bool threads_as_ranks);

  // Comes to the next round, or goes on with one that it could not leave, and waits until it is
  // decided. `offer`: descriptor of fresh memory for the new communicator; that of the lowest rank
  // is used. It is kept open until the ranks have joined or this one is gone.
  // Returns the ranks that are left, ascending; this one is among them. Empty if `check` gave up.
  std::vector<uint32_t> agree(int offer, const Check& check);

  // What a rank that is left has offered in the round: its process and the descriptor there.
  int32_t pid_of(uint32_t rank) const;
  int32_t offer_of(uint32_t rank) const;

  // Whether it still offers that. To be asked after opening it: the descriptor may have been closed
  // and reused.
  bool offers(uint32_t rank) const;
  // Waits until it does not; false if `check` gave up.
  bool await_other_offer(uint32_t rank, const Check& check) const;

  // Publishes that this rank has joined, and waits for the others. kAnother: one of them cannot
  // any more; drop what was made for the round. kLate: `check` gave up; the others may have gone
  // on, so call this again.
  Round join(const Check& check);

  // The ranks that this one still waits for: to come, or to join a round that has been decided.
  std::vector<uint32_t> missing() const;

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
  bool standing_ = false;         // this rank has come, and the round is not known to be decided
  std::vector<uint32_t> left_{};  // of a round that has been decided
};

}  // namespace pycoll
