// Which way large ordinary arrays go from rank to rank: through cells, or straight out of their
// owner's memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "base/recent_times.h"

namespace pycoll {

// What a rank tells its peers of one kind of call, in the flag line: nanoseconds that such a call
// has taken it, apart from those in which it waited for peers to come. 0: not known yet; kNever: it
// cannot.
struct ToldTimes {
  static constexpr float kNever = std::numeric_limits<float>::infinity();
  float staged = 0, read = 0;

  void worse_of(const ToldTimes& other) {
    staged = std::max(staged, other.staged);
    read = std::max(read, other.read);
  }
};

// The choice between two plans for the calls of one descriptor and count.
//
// Which is faster depends on the pages that arrays lie on, on whether their bytes change between
// calls and on how far apart cores are; nobody tells that, and it changes. So both are tried, and
// now and then the other one again. The slowest rank decides. Every rank makes the same choice,
// since it depends on nothing but what all ranks have told in calls that have succeeded: if one has
// on some ranks only, the communicator has failed. Not thread-safe.
class CopyChoice {
 public:
  // Whether the next call reads its peers' arrays.
  bool reads() const { return reads_; }
  // Whether the next call is to be timed.
  bool timed() const { return calls_ < kFirst || probes() || calls_ % kTimedEvery == 0; }

  // Begins a call; what this rank tells in it. `able`: it can read its peers' memory.
  ToldTimes begin(bool able) {
    return worst_ = {best(kStaged), able ? best(kRead) : ToldTimes::kNever};
  }
  // What a peer tells in this call.
  void hear(const ToldTimes& peer) { worst_.worse_of(peer); }

  // Ends a call that has succeeded. `ns`: what it took if it was timed.
  void end(uint64_t ns) {
    if (timed()) times_[reads_].note(std::max(1.0, static_cast<double>(ns)));
    ++calls_;
    plan_probes();
    reads_ = worst_.read < ToldTimes::kNever && wanted();
  }

 private:
  enum Way : bool { kStaged = false, kRead = true };
  static constexpr uint64_t kPair = 2, kFirst = 8, kTimedEvery = 4, kProbe = 3;
  static constexpr uint64_t kOften = 128, kSeldom = 1024;  // calls between probes, at most
  static constexpr uint64_t kPatience = 16;  // calls before an early probe; twice as many each time
  static constexpr float kHopeless = 1.5F, kMoved = 1.4F;

  // Whether the next call tries the other way: three calls in a row, for the first ones find the
  // caches as the other way has left them.
  bool probes() const { return calls_ >= probe_; }

  // Probes are soon at first, when arrays are cold, and seldom where they show nothing new. One
  // comes early where the faster way no longer takes what it took: these may be other arrays.
  void plan_probes() {
    const auto [less, more] = std::minmax(worst_.read, worst_.staged);
    if (calls_ == probe_ + kProbe) {
      const bool hopeless = more > kHopeless * less;
      interval_ = hopeless ? std::min(8 * interval_, kSeldom) : std::min(2 * interval_, kOften);
      patience_ = early_ ? std::min(2 * patience_, kOften) : kPatience;
      early_ = false;
      settled_ = less;
      probe_ = calls_ + interval_;
      may_be_early_ = calls_ + patience_;
    } else if (!probes() && calls_ >= may_be_early_ && has_moved(less)) {
      early_ = true;
      probe_ = calls_;
    }
  }

  bool has_moved(float ns) const {
    return std::max(ns, settled_) > kMoved * std::min(ns, settled_);
  }

  bool wanted() const {
    if (calls_ < kFirst) return calls_ / kPair % 2 == 1;
    return (worst_.read < worst_.staged) != probes();
  }
  float best(Way way) const { return static_cast<float>(times_[way].best_or(0)); }

  bool reads_ = false;
  uint64_t calls_ = 0, interval_ = kFirst / 2;
  uint64_t probe_ = kFirst - kProbe;  // number of the running or next probe
  uint64_t patience_ = kPatience, may_be_early_ = kFirst;
  bool early_ = false;  // the running probe
  float settled_ = 0;   // what the faster way took at the end of the last one
  std::array<RecentTimes<4>, 2> times_;
  ToldTimes worst_;  // of all ranks, as told in the running call
};

}  // namespace pycoll
