// Calls that a rank has left early: what it hears of them later, and what it says of them. See
// unproven.h.
#include <algorithm>
#include <map>
#include <utility>

#include "engine/bind.h"
#include "transports/messages/message_engine.h"
#include "transports/messages/unproven.h"

namespace pycoll {
namespace {

constexpr size_t kMostRefusals = 64;  // that are kept

}  // namespace

void UnprovenCalls::add(PastCall call) {
  word_ = fingerprint_of(word_, call.descriptor, call.count, static_cast<uint32_t>(call.check));
  calls_.push_back(std::move(call));
}

bool MessageEngine::may_leave(const BoundCall& call) const {
  return options_.early && call.agree && call.tiny && call.team.empty() && world_size_ > 1 &&
         !unproven_.full();
}

// Before a call begins: a rank that leaves every call early never waits, and waits hear of
// failures. A look costs as much as a call, so those that follow at once make one together.
void MessageEngine::look_back() {
  const uint64_t now = coarse_ns();
  if (std::exchange(looked_back_ns_, now) == now) return;
  receive_notices(kPeersPerLook);
  if (failed_) raise_failure();
  check_connections();
  compare();
}

// Raises if somebody is known to have made another call than this rank, in this one or in one that
// this rank has left early, or to have refused the latter.
void MessageEngine::compare() {
  if (questions_.empty() && theirs_.empty() && refusals_.empty()) return;
  const PastCall now{rank_, in_call_ ? seq_ : 0, last_descriptor_, last_count_, last_check_};
  const auto check = [&](const PastCall& theirs) {
    const PastCall* left = unproven_.find(theirs.seq);
    const PastCall& mine = left == nullptr ? now : *left;
    if (mine.differs(theirs)) fail(Cause::kMismatch, theirs.src);
  };
  for (const Notice& ask : questions_) check(past_of(ask));
  for (const PastCall& call : theirs_) check(call);
  for (const Refusal& refusal : refusals_) {
    if (unproven_.find(refusal.seq) != nullptr) fail(Cause::kMismatch, refusal.origin);
  }
}

// At the end of a call that this rank has done its part of.
void MessageEngine::pass(const BoundCall& call) {
  if (!options_.early) return;
  const Locked lock(mutex_);
  if (!early_) {
    unproven_.clear();
    std::erase_if(refusals_, [&](const Refusal& refusal) { return refusal.seq <= seq_; });
    return;  // of a later call a faster rank may have said that it refuses it
  }
  unproven_.add({rank_, seq_, call.descriptor, call.count, last_check_, last_site_});
  compare();
}

PastCall MessageEngine::past_of(const Notice& notice) {
  return {notice.src, notice.seq, notice.descriptor, notice.count, notice.check, 0, notice.site};
}

// What a rank says of a call that it has left, or what a message of it shows.
void MessageEngine::remember(PastCall call) {
  if (!options_.early) return;
  uint64_t oldest = call.seq;
  size_t known = 0;
  for (PastCall& other : theirs_) {
    if (other.src != call.src) continue;
    if (other.seq == call.seq) {
      other = std::move(call);
      return;
    }
    oldest = std::min(oldest, other.seq);
    ++known;
  }
  if (known > UnprovenCalls::kMost) {
    std::erase_if(theirs_, [&](const PastCall& other) {
      return other.src == call.src && other.seq == oldest;
    });
  }
  theirs_.push_back(std::move(call));
}

void MessageEngine::remember_refusal(const Notice& notice) {
  if (!options_.early) return;
  if (refusals_.size() == kMostRefusals) refusals_.erase(refusals_.begin());
  refusals_.push_back({notice.seq, notice.culprit, notice.text});
}

const PastCall* MessageEngine::past(uint32_t rank, uint64_t seq) const {
  if (rank == rank_) return unproven_.find(seq);
  const auto found = std::find_if(theirs_.begin(), theirs_.end(), [&](const PastCall& call) {
    return call.src == rank && call.seq == seq;
  });
  return found == theirs_.end() ? nullptr : &*found;
}

// The oldest call that a failure may be about, which comes behind what its rank says of the past.
uint64_t MessageEngine::first_suspect(const Notice& record) const {
  uint64_t seq = record.seq;
  if (Cause(record.cause) != Cause::kMismatch) return seq;
  for (const PastCall& call : theirs_) {
    if (call.src == record.src) seq = std::min(seq, call.seq);
  }
  return seq;
}

// Tells all others which calls this rank has left early, before a record of what it does now.
void MessageEngine::tell_past() {
  for (const PastCall& call : unproven_.all()) {
    Notice notice;
    notice.kind = Notice::kPast;
    notice.src = rank_;
    notice.seq = call.seq;
    notice.descriptor = call.descriptor;
    notice.count = call.count;
    notice.check = call.check;
    store_text(notice.site, sizeof(notice.site), site_text(call.site));
    notify_all(notice);
  }
}

// The first call that ranks know to have made differently; `seq` if there is none before that.
uint64_t MessageEngine::first_difference(uint64_t seq) const {
  std::map<uint64_t, PastCall> made;  // by the first rank that is known to have made it
  const auto compare = [&](const PastCall& call) {
    const auto [known, fresh] = made.try_emplace(call.seq, call);
    if (!fresh && known->second.differs(call)) seq = std::min(seq, call.seq);
  };
  for (const Notice& record : records_) {
    if (record.kind == Notice::kRecord && record.in_call != 0) compare(past_of(record));
  }
  for (const PastCall& call : unproven_.all()) compare(call);
  for (const PastCall& call : theirs_) compare(call);
  return seq;
}

// The first refusal of a call that other ranks have left early, or could have; null if there is
// none.
const MessageEngine::Refusal* MessageEngine::refusal_of_made() const {
  const Refusal* found = nullptr;
  for (const Refusal& refusal : refusals_) {
    bool made = false;
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      const Notice& record = records_[rank];
      const bool inside = record.kind == Notice::kRecord && record.in_call != 0;
      made = made || past(rank, refusal.seq) != nullptr || (inside && record.seq == refusal.seq);
    }
    if (made && (found == nullptr || refusal.seq < found->seq)) found = &refusal;
  }
  return found;
}

// A report about ranks that have made different calls is about the first of these.
void MessageEngine::look_for_first(MessageReport& report) const {
  if (!options_.early || report.cause != Cause::kMismatch) return;
  if (const Refusal* refusal = refusal_of_made()) {
    report.iteration = refusal->seq;
    report.culprit = refusal->origin;
    report.text = "has refused its arguments: " + refusal->text;
  } else {
    report.iteration = first_difference(report.iteration);
  }
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    Notice& record = report.ranks[rank];
    const PastCall* call = past(rank, report.iteration);
    if (call == nullptr || (record.in_call != 0 && record.seq == report.iteration)) continue;
    record.kind = Notice::kPast;
    record.src = rank;
    record.seq = call->seq;
    record.in_call = 1;
    record.descriptor = call->descriptor;
    record.count = call->count;
    record.check = call->check;
    record.waiting_peer = -1;
    const std::string site = rank == rank_ ? site_text(call->site) : call->site_text;
    store_text(record.site, sizeof(record.site), site);
  }
}

}  // namespace pycoll
