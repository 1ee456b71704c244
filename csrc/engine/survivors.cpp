#include "engine/survivors.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>

#include "base/liveness.h"

namespace pycoll {
namespace {

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;
constexpr uint64_t kLockNs = 1'000'000'000;  // far longer than a running rank holds the lock

// Takes a robust lock if it is free. Its last owner may have died: what it guards is changed so
// that every state in between is one that may be.
bool try_lock(pthread_mutex_t* lock) {
  const int rc = pthread_mutex_trylock(lock);
  if (rc == EOWNERDEAD) pthread_mutex_consistent(lock);
  return rc == 0 || rc == EOWNERDEAD;
}

}  // namespace

Survivors::Survivors(std::shared_ptr<ControlSegment> control, uint32_t rank, bool threads_as_ranks)
    : control_(std::move(control)), rank_(rank), threads_(threads_as_ranks) {}

// A rank that has left by an exception may still be inside of a direct call, on another thread.
bool Survivors::gone(uint32_t rank) const {
  RankBlock& block = control_->block(rank);
  switch (Phase(block.phase.load(kAcquire))) {
    case Phase::kClosed:
      return true;
    case Phase::kLeft:
      if (block.inside.load(kAcquire) == 0) return true;
      [[fallthrough]];
    default:
      if (threads_ || control_->died_joining(rank)) return !threads_;
      return owner_died(&block.liveness) &&
             process_over(block.pid.load(std::memory_order_relaxed),
                          block.starttime.load(std::memory_order_relaxed));
  }
}

bool Survivors::decided() const { return control_->election().decided.load(kAcquire) >= round_; }

// Whether every rank has come to the round or is gone.
bool Survivors::settled() const {
  for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
    if (control_->block(rank).came.load(kAcquire) < round_ && !gone(rank)) return false;
  }
  return true;
}

// Decides the round if that is possible now.
bool Survivors::decide() {
  Election& election = control_->election();
  if (!settled() || !try_lock(&election.lock)) return false;
  if (!decided() && settled()) {
    for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
      RankBlock& block = control_->block(rank);
      const bool counts = block.came.load(kAcquire) >= round_ && !gone(rank);
      block.counted.store(counts ? round_ : 0, std::memory_order_relaxed);
    }
    election.decided.store(round_, kRelease);
  }
  pthread_mutex_unlock(&election.lock);
  return decided();
}

// Takes back that this rank has come. False: the round has been decided, or is being decided by a
// rank that has been stopped.
bool Survivors::withdraw() {
  Election& election = control_->election();
  const uint64_t end = now_ns() + kLockNs;
  const auto locked = [&] { return try_lock(&election.lock); };
  if (!wait_until(kPatient, Bell{}, locked, [&](Pulse) { return now_ns() >= end; })) return false;
  const bool early = !decided();
  if (early) control_->block(rank_).came.store(round_ - 1, kRelease);
  pthread_mutex_unlock(&election.lock);
  return early;
}

std::vector<uint32_t> Survivors::agree(int offer, const Check& check) {
  left_.clear();
  if (!standing_) {
    RankBlock& own = control_->block(rank_);
    round_ = own.came.load(std::memory_order_relaxed) + 1;
    own.offer.store(offer, std::memory_order_relaxed);
    own.came.store(round_, kRelease);
  }
  standing_ = true;
  const auto known = [this] { return decided() || decide(); };
  if (!wait_until(kPatient, Bell{}, known, check)) {
    standing_ = !withdraw();
    if (!standing_ || !decided()) return {};
  }
  standing_ = false;
  for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
    const uint64_t counted = control_->block(rank).counted.load(std::memory_order_relaxed);
    if (counted == round_) left_.push_back(rank);
  }
  return left_;
}

int32_t Survivors::pid_of(uint32_t rank) const {
  return control_->block(rank).pid.load(std::memory_order_relaxed);
}

int32_t Survivors::offer_of(uint32_t rank) const {
  return control_->block(rank).offer.load(std::memory_order_relaxed);
}

bool Survivors::offers(uint32_t rank) const {
  RankBlock& block = control_->block(rank);
  return block.came.load(kAcquire) == round_ && Phase(block.phase.load(kAcquire)) == Phase::kRun &&
         (threads_ || !owner_died(&block.liveness));
}

bool Survivors::await_other_offer(uint32_t rank, const Check& check) const {
  return wait_until(kPatient, Bell{}, [&] { return !offers(rank); }, check);
}

bool Survivors::joined(uint32_t rank) const {
  return control_->block(rank).joined.load(kAcquire) >= round_;
}

// Whether a rank will never join this round: it is gone, or has come to the next.
bool Survivors::out(uint32_t rank) const {
  const bool passed = control_->block(rank).came.load(kAcquire) > round_ || gone(rank);
  return passed && !joined(rank);
}

Round Survivors::join(const Check& check) {
  control_->block(rank_).joined.store(round_, kRelease);
  const auto all = [this] {
    return std::all_of(left_.begin(), left_.end(), [this](uint32_t r) { return joined(r); });
  };
  const auto one_out = [this] {
    return std::any_of(left_.begin(), left_.end(), [this](uint32_t r) { return out(r); });
  };
  const bool over = wait_until(kPatient, Bell{}, [&] { return all() || one_out(); }, check);
  return all() ? Round::kJoined : over ? Round::kAnother : Round::kLate;
}

std::vector<uint32_t> Survivors::missing() const {
  std::vector<uint32_t> found;
  for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
    const bool came = control_->block(rank).came.load(kAcquire) >= round_;
    if (left_.empty() && rank != rank_ && !came && !gone(rank)) found.push_back(rank);
  }
  for (const uint32_t rank : left_) {
    if (!joined(rank)) found.push_back(rank);
  }
  return found;
}

}  // namespace pycoll
