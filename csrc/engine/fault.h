// How a communicator fails: one cause, one snapshot, the same error on every rank.
//
// The first rank to notice sets the abort word, writes the report and marks it ready; everybody
// else waits for it (at most 1 s) and raises from it. If that rank dies first, one of those that
// wait writes the report. Nothing resets an abort.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "memory/control.h"

namespace pycoll {

// The snapshot behind an abort, copied out of the segment.
struct Report {
  Cause cause = Cause::kNone;  // kNone: no abort so far
  uint32_t culprit = 0;
  uint32_t reporter = 0;  // the rank that took the snapshot
  uint64_t iteration = 0;
  bool complete = false;  // false: the reporter did not finish; `ranks` is empty
  std::string text;       // of leave or abort
  std::vector<RankReport> ranks;
};

// The kind of error that a cause raises: MismatchError, PeerLost, PeerLeft, CollTimeout,
// Revoked (interrupt, abort).
const char* kind_of(Cause cause);

// Of the kind of its cause.
class Aborted : public Error {
 public:
  Aborted(Cause cause, const std::string& text);
  Cause cause() const { return cause_; }

 private:
  Cause cause_;
};

// What failed, in one line; pycoll/runtime/sessions/reports.py writes about every rank.
std::string describe(const Report& report);
// "rank 3", or "any rank".
std::string rank_name(int32_t rank);
// "send from rank 0 to rank 1 (tag 2, 8 bytes)", and likewise of a recv by this `rank`.
std::string message_text(bool incoming, uint32_t rank, int32_t peer, uint32_t tag, uint64_t nbytes);
// For recv() when nothing has come in time.
[[noreturn]] void throw_nothing_came(uint32_t rank, int32_t src, uint32_t tag, double timeout_s);
// For recv() when another message has come than the one that was asked for.
struct MessageKind {
  uint64_t nbytes;
  uint32_t type;
  bool operator==(const MessageKind&) const = default;
};
[[noreturn]] void throw_mismatch(uint32_t rank, uint32_t tag, const MessageKind& expected,
                                 uint32_t src, const MessageKind& sent);
// The end of the error text when a wait for a message ends because this rank has closed.
const char* closed_text(int32_t rank);

// The failures of one communicator as one rank sees and makes them. Thread-safe.
class Faults {
 public:
  // `threads_as_ranks`: all ranks live in this process, so the liveness locks are not used.
  Faults(std::shared_ptr<ControlSegment> control, uint32_t rank, bool threads_as_ranks);

  // In the one order of all sequentially consistent accesses, as a direct call needs: whoever
  // enters one says so before this look; whoever leaves a failed one looks who is inside after the
  // word is set. One of the two sees the other.
  bool pending() const { return word_->load(std::memory_order_seq_cst) != 0; }
  AbortWord word() const { return AbortWord::unpack(word_->load(std::memory_order_acquire)); }

  // Makes this cause the abort of the communicator unless there is one, and wakes everybody.
  void set(Cause cause, uint32_t culprit, uint64_t iteration, std::string_view text = {});

  // set(), then throw_pending().
  [[noreturn]] void raise(Cause cause, uint32_t culprit, uint64_t iteration,
                          std::string_view text = {});

  // Throws Aborted for the abort that is set; waits for its report first.
  [[noreturn]] void throw_pending();

  // Raises if an abort is pending, a peer's process died or a peer left. A few loads per peer.
  void check_peers(uint64_t iteration);

  bool closed(uint32_t peer) const;
  // Whether there are other ranks and all of them have closed.
  bool others_closed() const;

  // The rank at the end of the chain of waits that starts at `peer`.
  uint32_t last_in_chain(uint32_t peer) const;

  // The snapshot if an abort is set (waits for it), else a Report with cause kNone.
  Report report();

 private:
  void publish_report(uint64_t iteration, std::string_view text);
  void take_over(const AbortWord& word);
  void fill(uint32_t rank, uint64_t iteration, RankReport& entry);
  void await_others(uint64_t iteration);

  std::shared_ptr<ControlSegment> control_;
  std::atomic<uint64_t>* word_;
  uint32_t rank_;
  bool threads_;
  std::atomic<bool> gave_up_{false};  // a wait for the report has taken too long
  std::mutex mutex_;                  // of report_
  Report report_;
};

}  // namespace pycoll
