// Which way large ordinary arrays go from rank to rank: through staging buffers, or straight out of
// their owner's memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "base/recent_times.h"

namespace pycoll {

// What a rank reports to its peers about one kind of call, in the flag line: the nanoseconds that
// such a call takes, apart from waits for peers to enter. 0: not known yet; kNever: it cannot.
struct ReportedTimes {
  static constexpr float kNever = std::numeric_limits<float>::infinity();
  float staged = 0, read = 0;
};

// The choice between two plans for the calls of one descriptor and count.
//
// Which is faster depends on the pages that arrays lie on, on whether their bytes change between
// calls and on how far apart cores are; no interface says that, and it changes. So calls try both,
// and now and then, and when their time changes, the other one again. The slowest rank decides.
// Every rank makes the same choice, since it depends only on what all ranks have reported in calls
// that have succeeded: if one has on some ranks only, the communicator has failed. Not thread-safe.
class CopyChoice {
 public:
  // Whether the next call reads its peers' arrays.
  bool reads() const { return reads_; }
  // Whether the next call is to be timed: reading the clock costs a short one up to a hundredth.
  bool timed() const {
    return calls_ < kFirst || probes() || usual_ > kLongNs || calls_ % kTimedEvery == 0;
  }

  // Begins a call; returns what this rank reports in it. `able`: it can read its peers' memory.
  ReportedTimes begin(bool able) {
    return worst_ = {best(kStaged), able ? best(kRead) : ReportedTimes::kNever};
  }
  // Takes what a peer reports in this call.
  void add(const ReportedTimes& peer) {
    worst_ = {std::max(worst_.staged, peer.staged), std::max(worst_.read, peer.read)};
  }

  // Ends a call that has succeeded. `ns`: what it took if it was timed.
  void end(uint64_t ns) {
    if (timed()) times_[reads_].note(std::max(1.0, static_cast<double>(ns)));
    const float now = reads_ ? worst_.read : worst_.staged;
    ++calls_;
    if (calls_ == probe_ + kProbe) {
      end_probe();
    } else if (calls_ == settled_) {
      usual_ = now;
    } else if (calls_ > settled_ && !probes() && calls_ >= alert_ && changed(now)) {
      probe_ = calls_;
      times_[!reads_] = {};
      alert_ = calls_ + alert_after_;
      alert_after_ = std::min(2 * alert_after_, kOften);
    }
    if (calls_ >= kFirst && !probes()) lead_ = faster();
    reads_ = worst_.read < ReportedTimes::kNever && wanted();
  }

 private:
  enum Way : bool { kStaged = false, kRead = true };
  static constexpr size_t kKept = 4;
  static constexpr uint64_t kPair = 2, kFirst = 8, kTimedEvery = 4, kProbe = 3;
  static constexpr uint64_t kOften = 128, kSeldom = 1024;  // calls between probes, at most
  static constexpr uint64_t kAlert = 8;                    // from one change to the next, at least
  static constexpr float kHopeless = 1.5F, kChange = 1.25F, kLongNs = 20'000;

  // Whether the next call tries the other way: three calls in a row, for the first ones find the
  // caches as the other way has left them. Soon at first, when arrays are cold, and when the calls
  // have become others: their arrays lie elsewhere, say, or are used in place.
  bool probes() const { return calls_ >= probe_; }
  bool changed(float now) const { return now > kChange * usual_ || kChange * now < usual_; }
  Way faster() const { return worst_.read < worst_.staged ? kRead : kStaged; }

  void end_probe() {
    const auto [less, more] = std::minmax(worst_.read, worst_.staged);
    const bool hopeless = more > kHopeless * less;
    interval_ = hopeless ? std::min(8 * interval_, kSeldom) : std::min(2 * interval_, kOften);
    probe_ = calls_ + interval_;
    if (lead_ != faster()) alert_after_ = kAlert;
    settled_ = calls_ + kKept * (less > kLongNs ? 1 : kTimedEvery);
  }

  bool wanted() const {
    if (calls_ < kFirst) return calls_ / kPair % 2 == 1;
    return lead_ != probes();
  }
  float best(Way way) const { return static_cast<float>(times_[way].best_or(0)); }

  bool reads_ = false;
  Way lead_ = kStaged;  // the faster way, as far as is known
  uint64_t calls_ = 0, interval_ = kFirst / 2;
  uint64_t probe_ = kFirst - kProbe;           // number of the running or next probe
  uint64_t settled_ = 0;                       // from this call on the times are of calls in a row
  uint64_t alert_ = 0, alert_after_ = kAlert;  // from then on another time starts a probe
  float usual_ = 0;                            // time of a call when they had settled
  std::array<RecentTimes<kKept>, 2> times_;
  ReportedTimes worst_;  // of all ranks, as reported in the running call
};

}  // namespace pycoll
