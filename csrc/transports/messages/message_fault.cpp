// How a communicator over MPI fails: who tells whom, and the report that all make of it.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

#include "engine/fault.h"
#include "transports/messages/message_engine.h"

namespace pycoll {
namespace {

constexpr uint32_t kLooksInYield = 2;             // of ranks, for notices
constexpr uint64_t kAskNs = 20'000'000;           // a wait this long is worth a question
constexpr uint64_t kClosedGraceNs = 200'000'000;  // what a peer sent before it closed may be late

// Packets of a call that is refused come until their senders have heard of it: so many calls behind
// it look for them when they begin.
constexpr uint64_t kCallsWithStale = 3;

// Whether every rank should say what it was doing before anybody raises.
bool needs_words(Cause cause) { return cause == Cause::kMismatch || cause == Cause::kTimeout; }

}  // namespace

Notice MpiEngine::own_record(Notice::Kind kind) const {
  Notice notice;
  notice.kind = kind;
  notice.src = rank_;
  notice.seq = seq_;
  notice.in_call = in_call_;
  notice.descriptor = last_descriptor_;
  notice.count = last_count_;
  notice.check = last_check_;
  if (in_call_ && waiting_.peer >= 0) {
    notice.waiting_peer = waiting_.peer;
    notice.waiting_step = waiting_.step;
    notice.waiting_ns = now_ns() - waiting_since_ns_;
  }
  const std::lock_guard lock(site_mutex_);
  store_text(notice.site, sizeof(notice.site), site_texts_[last_site_]);
  return notice;
}

void MpiEngine::tell_all(const Notice& notice) {
  const uint64_t nbytes = offsetof(Notice, text) + std::strlen(notice.text) + 1;
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    // Who has closed waits a moment for others to close: see close().
    if (peer == rank_ || (gone_[peer] && notice.kind != Notice::kClosed)) continue;
    try {
      link_.send_notice(peer, &notice, nbytes);
    } catch (const Error&) {  // whoever MPI cannot reach will not miss it, the others must not
      gone_[peer] = true;
    }
  }
}

void MpiEngine::look_for_notices(uint32_t looks) {
  Notice notice;
  while (link_.take_notice(&notice, sizeof(notice), looks)) {
    notice.text[sizeof(notice.text) - 1] = '\0';
    handle(notice);
  }
}

void MpiEngine::handle(const Notice& notice) {
  const uint32_t src = notice.src;
  if (src >= world_size_) return;
  switch (notice.kind) {
    case Notice::kRefused:
      last_refusal_ = std::max(last_refusal_, notice.seq);
      if (notice.seq >= seq_) refused_[notice.seq] = {notice.culprit, notice.text};
      return;
    case Notice::kAsk:
      if (notice.seq >= seq_) asks_.push_back(notice);
      return;
    case Notice::kClosed:
      gone_[src] = true;
      return;
    case Notice::kLeft:
      gone_[src] = true;
      if (failed_ || someone_fails_) return;
      records_[src] = notice;
      report_ = {Cause::kLeft, src, src, seq_, notice.text, records_};
      failure_kind_ = kind_of(Cause::kLeft);
      failure_text_ = notice.text;
      failed_ = true;
      return;
    case Notice::kSpread:
      if (failed_) return;
      failure_kind_ = notice.name;
      failure_text_ = notice.text;
      failed_ = true;
      return;
    default:
      records_[src] = notice;
      if (failed_) return;
      someone_fails_ = true;
      failing_seq_ = std::max(failing_seq_, notice.seq);
      if (failing_since_ns_ == 0) failing_since_ns_ = now_ns();
  }
}

void MpiEngine::check_call(const MpiTask& task, Pulse pulse) {
  look_for_notices(pulse == Pulse::kYield ? kLooksInYield : kLooks);
  if (failed_) raise_failure();
  if (must_conclude()) conclude();
  if (refused_.count(seq_) != 0) rejected();
  for (const Notice& ask : asks_) {
    const bool same =
        ask.descriptor == last_descriptor_ && ask.count == last_count_ && ask.check == last_check_;
    if (ask.seq == seq_ && !same) fail(Cause::kMismatch, ask.src);
  }
  const uint64_t now = now_ns();
  const Waiting waiting = task.waiting();
  if (waiting.peer != waiting_.peer || waiting.step != waiting_.step) {
    waiting_ = waiting;
    waiting_since_ns_ = now;
  }
  if (deadline_ns_ == 0) deadline_ns_ = deadline_after(job_.timeout_s);
  const auto peer = static_cast<uint32_t>(std::max(0, waiting.peer));
  if (waiting.peer >= 0 && gone_[peer] && now - waiting_since_ns_ >= kClosedGraceNs) {
    fail(Cause::kLeft, peer, "it closed its communicator while others waited for it");
  }
  if (waiting.peer >= 0 && now - waiting_since_ns_ >= kAskNs) ask(peer);
  if (now >= deadline_ns_) fail(Cause::kTimeout, peer);
  if (signals_) check_signals(pulse);
}

// What goes wrong in a later call does not keep us from ending this one, if it ends soon.
bool MpiEngine::must_conclude() const {
  if (!someone_fails_) return false;
  return seq_ >= failing_seq_ || now_ns() - failing_since_ns_ >= kClosedGraceNs;
}

// Ranks in different calls may wait for each other where no message shows it: one has sent its data
// in packets, and the other waits for an agreement. Of those who are stuck, one waits for a rank in
// another call, because plans themselves do not block. So each asks whom it waits for, once.
void MpiEngine::ask(uint32_t peer) {
  if (std::find(asked_.begin(), asked_.end(), peer) != asked_.end()) return;
  asked_.push_back(peer);
  const Notice notice = own_record(Notice::kAsk);
  link_.send_notice(peer, &notice, offsetof(Notice, text) + 1);
}

// Notices `cause`, tells everybody, and raises what all of them make of it.
void MpiEngine::fail(Cause cause, uint32_t culprit, std::string_view text) {
  Notice& own = records_[rank_];
  own = own_record(Notice::kRecord);
  own.cause = static_cast<uint32_t>(cause);
  own.culprit = culprit;
  store_text(own.text, sizeof(own.text), text);
  conclude();
}

void MpiEngine::conclude() {
  if (records_[rank_].kind == 0) records_[rank_] = own_record(Notice::kRecord);
  tell_all(records_[rank_]);
  const auto noticed = [&] {
    return std::find_if(records_.begin(), records_.end(),
                        [](const Notice& n) { return n.kind == Notice::kRecord && n.cause != 0; });
  };
  const uint64_t until = now_ns() + kGraceNs;
  wait_until(
      policy_, Bell{},
      [&] {
        look_for_notices(kLooks);
        if (noticed() != records_.end() && !needs_words(Cause(noticed()->cause))) return true;
        for (uint32_t r = 0; r < world_size_; ++r) {
          if (records_[r].kind == 0 && !gone_[r]) return false;
        }
        return true;
      },
      [&](Pulse) { return now_ns() >= until; });
  flush(kGraceNs / 10);
  if (!failed_) {
    const auto first = noticed();
    const Cause cause = first == records_.end() ? Cause::kNone : Cause(first->cause);
    if (first != records_.end()) {
      report_ = {cause, first->culprit, first->src, first->seq, first->text, records_};
    }
    failure_kind_ = cause == Cause::kNone ? "TransportError" : kind_of(cause);
    failure_text_ = first == records_.end() ? "the communicator failed" : first->text;
    failed_ = true;
  }
  raise_failure();
}

void MpiEngine::raise_failure() {
  const std::lock_guard lock(mutex_);
  in_call_ = false;
  throw Error(name_known(failure_kind_), failure_text_);
}

// Kinds travel by name; an Error needs one with static storage.
const char* MpiEngine::name_known(const std::string& name) {
  for (const char* known : {"MismatchError", "PeerLost", "PeerLeft", "CollTimeout", "Revoked",
                            "CommClosed", "ScheduleError"}) {
    if (name == known) return known;
  }
  return "TransportError";
}

void MpiEngine::rejected() {
  const Refused refused = refused_[seq_];
  end();
  stale_until_ = seq_ + kCallsWithStale;
  throw_error("PeerRejected", "rank ", refused.origin,
              " refused its arguments for this call: ", refused.text);
}

void MpiEngine::refuse(std::string_view text, uint32_t site) {
  check_usable();
  const Use use(user_, rank_);
  settle();
  const std::lock_guard lock(mutex_);
  if (failed_) raise_failure();
  last_site_ = site;
  Notice notice = own_record(Notice::kRefused);
  notice.culprit = rank_;
  store_text(notice.text, sizeof(notice.text), text);
  tell_all(notice);
  flush(kGraceNs);
  end();
  stale_until_ = seq_ + kCallsWithStale;
}

void MpiEngine::abort(std::string_view text) {
  check_usable();
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  fail_quietly(Cause::kAbort, text);
}

void MpiEngine::fail_quietly(Cause cause, std::string_view text) {
  Notice& own = records_[rank_];
  own = own_record(Notice::kRecord);
  own.cause = static_cast<uint32_t>(cause);
  own.culprit = rank_;
  store_text(own.text, sizeof(own.text), text);
  tell_all(own);
  report_ = {cause, rank_, rank_, seq_, own.text, records_};
  failure_kind_ = cause == Cause::kNone ? "TransportError" : kind_of(cause);
  failure_text_ = text;
  failed_ = true;
  flush(kGraceNs / 10);
}

void MpiEngine::out_of_memory() {
  const std::lock_guard lock(mutex_);
  try {
    const std::string who = "rank " + std::to_string(rank_);
    const bool speaks = fork_guard_.at_home() && !closed_ && !failed_;
    if (speaks) fail_quietly(Cause::kAbort, who + " has no memory for its part of a call");
  } catch (const std::exception&) {  // nor for a notice: its peers wait until their time is over
    failure_kind_ = kind_of(Cause::kAbort);
    failure_text_ = "no memory";
    failed_ = true;
  }
  in_call_ = false;
  throw_error("MemoryError", "rank ", rank_,
              " has no memory for its part of a call; its communicator is aborted");
}

void MpiEngine::spread(const std::string& name, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (failed_ || closed_) return;
  Notice notice = own_record(Notice::kSpread);
  store_text(notice.name, sizeof(notice.name), name);
  store_text(notice.text, sizeof(notice.text), text);
  try {
    tell_all(notice);
    flush(kGraceNs / 10);
  } catch (const Error&) {  // MPI no longer answers
  }
  failure_kind_ = name;
  failure_text_ = text;
  failed_ = true;
}

void MpiEngine::poll() {
  check_usable();
  const std::lock_guard lock(mutex_);
  attempt([&] {
    look_for_notices(kLooks);
    if (failed_) raise_failure();
    if (someone_fails_) conclude();
  });
}

void MpiEngine::check_signals(Pulse pulse) {
  if (pulse != Pulse::kSlice || options_.check_signals == nullptr) return;
  if (!options_.check_signals(options_.context)) return;
  const std::lock_guard lock(mutex_);
  if (!failed_)
    fail_quietly(Cause::kInterrupt, "rank " + std::to_string(rank_) + " was interrupted");
  in_call_ = false;
  throw_error("Interrupted", "rank ", rank_, " was interrupted; its communicator is aborted");
}

bool MpiEngine::check(int32_t peer, Pulse pulse) {
  poll();
  check_signals(pulse);
  const std::lock_guard lock(mutex_);
  if (peer >= 0) return gone_[static_cast<uint32_t>(peer)];
  return peer == kAnyRank && world_size_ > 1 && others_gone();
}

MpiReport MpiEngine::report() const {
  if (!fork_guard_.at_home()) return {};
  const std::lock_guard lock(mutex_);
  return report_;
}

// MPI says that somebody has died, and leaves it to us to find out who: a moment later, if need be,
// for one part of MPI may know it before the others.
std::string MpiEngine::name_dead(const std::string& text) {
  const uint64_t until = now_ns() + kClosedGraceNs;
  int32_t dead = -1;
  wait_until(
      policy_, Bell{},
      [&] {
        dead = link_.find_dead();
        return dead >= 0;
      },
      [&](Pulse) { return now_ns() >= until; });
  if (dead < 0) return text;
  const std::lock_guard lock(mutex_);
  gone_[static_cast<size_t>(dead)] = true;
  return "rank " + std::to_string(dead) + " has died (" + text + ")";
}

// Runs a part of a call. What MPI itself complains of ends the communicator on every rank, and so
// does a lack of memory.
void MpiEngine::attempt(const std::function<void()>& part) {
  try {
    try {
      part();
    } catch (const Disagreement& found) {
      const std::lock_guard lock(mutex_);
      fail(Cause::kMismatch, found.peer);  // MPI may fail meanwhile
    }
  } catch (const std::bad_alloc&) {
    out_of_memory();
  } catch (const Error& error) {
    {
      const std::lock_guard lock(mutex_);
      in_call_ = false;
    }
    const std::string kind = error.kind();
    if (kind != "TransportError" && kind != "PeerLost") throw;
    if (failed_) raise_failure();  // a notice was faster, and says who it is
    const std::string text = kind == "PeerLost" ? name_dead(error.what()) : error.what();
    spread(kind, text);
    throw Error(name_known(kind), text);
  }
}

}  // namespace pycoll
