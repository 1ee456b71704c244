// How a communicator over messages fails: the notices, and the report that all ranks make of them.
#include <algorithm>
#include <cstring>
#include <new>

#include "engine/fault.h"
#include "transports/messages/message_engine.h"

namespace pycoll {
namespace {

constexpr uint32_t kLooksInYield = 2;             // of ranks, for notices
constexpr uint64_t kQuestionNs = 20'000'000;      // a wait this long is worth a question
constexpr uint64_t kClosedGraceNs = 200'000'000;  // what a peer sent before it closed may be late

// Eager messages of a call that is refused come until their senders have heard of it: so many calls
// behind it that nobody leaves early look for them when they begin.
constexpr uint64_t kCallsWithStale = 3;

// Whether every rank should say what it was doing before anybody raises.
bool needs_all_records(Cause cause) {
  return cause == Cause::kMismatch || cause == Cause::kTimeout;
}

// Kinds travel by name; an Error needs one of static storage.
const char* known_kind(const std::string& name) {
  for (const char* known : {"MismatchError", "PeerLost", "PeerLeft", "CollTimeout", "Revoked",
                            "CommClosed", "ScheduleError"}) {
    if (name == known) return known;
  }
  return "TransportError";
}

}  // namespace

Notice MessageEngine::own_record(Notice::Kind kind) const {
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
  store_text(notice.site, sizeof(notice.site), site_text(last_site_));
  return notice;
}

void MessageEngine::notify_all(const Notice& notice) {
  if (notice.kind <= Notice::kClosed) tell_past();
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    // A rank that has closed waits a moment for others to close: see close(). Or longer: prove().
    const bool waits = notice.kind == Notice::kClosed || options_.early;
    if (peer == rank_ || (departed_[peer] && !waits)) continue;
    try {
      link_.send_notice(peer, notice);
    } catch (const Error&) {  // a rank that cannot be reached must not keep it from the others
      departed_[peer] = true;
    }
  }
}

void MessageEngine::receive_notices(uint32_t looks) {
  Notice notice;
  while (link_.take_notice(notice, looks)) handle(notice);
}

void MessageEngine::handle(const Notice& notice) {
  const uint32_t src = notice.src;
  switch (notice.kind) {
    case Notice::kRefused:
      last_refusal_ = std::max(last_refusal_, notice.seq);
      if (notice.seq >= seq_) refused_[notice.seq] = {notice.culprit, notice.text};
      remember_refusal(notice);
      return;
    case Notice::kQuestion:
      if (notice.seq >= seq_ || unproven_.find(notice.seq) != nullptr) questions_.push_back(notice);
      return;
    case Notice::kPast:
      return remember(past_of(notice));
    case Notice::kClosed:
      departed_[src] = true;
      if (options_.early) records_[src] = notice;
      return;
    case Notice::kLeft:
      departed_[src] = true;
      if (failed_ || someone_fails_) return;
      records_[src] = notice;
      report_ = {Cause::kLeft, src, src, seq_, notice.text, records_};
      return set_failed(kind_of(Cause::kLeft), notice.text);
    case Notice::kRaise:
      if (!failed_) set_failed(notice.name, notice.text);
      return;
    default:
      records_[src] = notice;
      if (failed_) return;
      someone_fails_ = true;
      failing_seq_ = std::max(failing_seq_, notice.seq);
      if (failing_since_ns_ == 0) failing_since_ns_ = now_ns();
  }
}

void MessageEngine::check_call(const MessageTask& task, Pulse pulse) {
  receive_notices(pulse == Pulse::kYield ? kLooksInYield : kPeersPerLook);
  if (failed_) raise_failure();
  if (must_conclude()) conclude();
  check_connections();
  if (refused_.count(seq_) != 0) raise_refused();
  compare();
  const uint64_t now = now_ns();
  const Waiting waiting = task.waiting();
  if (waiting.peer != waiting_.peer || waiting.step != waiting_.step) {
    waiting_ = waiting;
    waiting_since_ns_ = now;
    if (board_ != nullptr) board_->waits(waiting.peer, waiting.step, now);
  }
  if (!deadline_.is_set()) deadline_ = Deadline(job_.timeout_s);
  const auto peer = static_cast<uint32_t>(std::max(0, waiting.peer));
  const bool late = now - waiting_since_ns_ >= kClosedGraceNs;
  if (waiting.peer >= 0 && late && departed(peer)) {
    fail(Cause::kLeft, peer, "it closed its communicator, or ended, while others waited for it");
  }
  if (waiting.peer >= 0 && now - waiting_since_ns_ >= kQuestionNs) question(peer);
  if (deadline_.passes()) fail(Cause::kTimeout, peer);
  if (signals_) check_signals(pulse);
}

// Raises if any rank has died, whichever rank is waited for: its connection has ended. What it sent
// before may explain that, so it is received first.
void MessageEngine::check_connections() {
  const int32_t lost = link_.first_lost(departed_);
  if (lost < 0) return;
  receive_notices(world_size_);
  if (failed_) raise_failure();
  if (departed_[static_cast<size_t>(lost)]) return;
  const Loss found = link_.loss(static_cast<uint32_t>(lost));
  throw Error(found.kind, found.text);
}

// A failure in a later call does not keep this one from ending, if it ends soon.
bool MessageEngine::must_conclude() const {
  if (!someone_fails_) return false;
  return seq_ >= failing_seq_ || now_ns() - failing_since_ns_ >= kClosedGraceNs;
}

// Ranks in different calls may wait for each other where no message shows it: one has sent its data
// eagerly, and the other waits for an agreement. Of those that are stuck, one waits for a rank in
// another call, because plans themselves do not block. So each questions the rank it waits for,
// once.
void MessageEngine::question(uint32_t peer) {
  if (std::find(questioned_.begin(), questioned_.end(), peer) != questioned_.end()) return;
  questioned_.push_back(peer);
  link_.send_notice(peer, own_record(Notice::kQuestion));
}

void MessageEngine::record(Cause cause, uint32_t culprit, std::string_view text) {
  Notice& own = records_[rank_];
  own = own_record(Notice::kRecord);
  own.cause = static_cast<uint32_t>(cause);
  own.culprit = culprit;
  store_text(own.text, sizeof(own.text), text);
}

void MessageEngine::set_failed(std::string_view kind, std::string_view text) {
  failure_kind_ = kind;
  failure_text_ = text;
  failed_ = true;
}

// Raises `cause` on every rank.
void MessageEngine::fail(Cause cause, uint32_t culprit, std::string_view text) {
  record(cause, culprit, text);
  conclude();
}

void MessageEngine::conclude() {
  if (records_[rank_].kind == 0) records_[rank_] = own_record(Notice::kRecord);
  notify_all(records_[rank_]);
  const auto noticed = [&] {
    return std::find_if(records_.begin(), records_.end(),
                        [](const Notice& n) { return n.kind == Notice::kRecord && n.cause != 0; });
  };
  const uint64_t until = now_ns() + kRecordsWaitNs;
  wait_until(
      policy_, bell(),
      [&] {
        receive_notices(kPeersPerLook);
        if (noticed() != records_.end() && !needs_all_records(Cause(noticed()->cause))) return true;
        for (uint32_t r = 0; r < world_size_; ++r) {
          const bool answers = !departed_[r] && (r == rank_ || link_.loss(r).order == 0);
          if (records_[r].kind == 0 && answers) return false;
        }
        return true;
      },
      [&](Pulse) { return now_ns() >= until; });
  flush(kRecordsWaitNs / 10);
  if (!failed_) {
    const auto first = noticed();
    const Cause cause = first == records_.end() ? Cause::kNone : Cause(first->cause);
    if (first != records_.end()) {
      report_ = {cause, first->culprit, first->src, first->seq, first->text, records_};
      look_for_first(report_);
    }
    set_failed(cause == Cause::kNone ? "TransportError" : kind_of(cause),
               first == records_.end() ? "the communicator failed" : first->text);
  }
  raise_failure();
}

void MessageEngine::raise_failure() {
  const std::lock_guard lock(mutex_);
  in_call_ = false;
  told_ = true;
  throw Error(known_kind(failure_kind_), failure_text_);
}

void MessageEngine::raise_refused() {
  const Refused refused = refused_[seq_];
  if (early_) fail(Cause::kMismatch, refused.origin);  // others may have left this call
  end();
  look_for_stale();
  throw_error("PeerRejected", "rank ", refused.origin,
              " refused its arguments for this call: ", refused.text);
}

void MessageEngine::refuse(std::string_view text, uint32_t site) {
  check_usable();
  const Use use(user_, rank_);
  settle();
  const std::lock_guard lock(mutex_);
  if (failed_) raise_failure();
  last_site_ = site;
  Notice notice = own_record(Notice::kRefused);
  notice.culprit = rank_;
  store_text(notice.text, sizeof(notice.text), text);
  remember_refusal(notice);
  notify_all(notice);
  flush(kRecordsWaitNs);
  end();
  look_for_stale();
}

void MessageEngine::look_for_stale() {
  stale_until_seq_ = seq_ + kCallsWithStale * (options_.early ? UnprovenCalls::kMost + 1 : 1);
}

void MessageEngine::abort(std::string_view text) {
  check_usable();
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  fail_quietly(Cause::kAbort, text);
}

void MessageEngine::fail_quietly(Cause cause, std::string_view text) {
  told_ = true;
  record(cause, rank_, text);
  notify_all(records_[rank_]);
  report_ = {cause, rank_, rank_, seq_, records_[rank_].text, records_};
  set_failed(kind_of(cause), text);
  flush(kRecordsWaitNs / 10);
}

void MessageEngine::out_of_memory() {
  const std::lock_guard lock(mutex_);
  try {
    const std::string who = "rank " + std::to_string(rank_);
    const bool usable = fork_guard_.at_home() && !closed_ && !failed_;
    if (usable) fail_quietly(Cause::kAbort, who + " has no memory for its part of a call");
  } catch (const std::exception&) {  // nor for a notice: its peers wait until their deadline
    set_failed(kind_of(Cause::kAbort), "no memory");
  }
  in_call_ = false;
  throw_error("MemoryError", "rank ", rank_,
              " has no memory for its part of a call; its communicator is aborted");
}

void MessageEngine::raise_on_all(const std::string& name, const std::string& text) {
  if (!at_home()) return;  // the ranks are the parent's
  const std::lock_guard lock(mutex_);
  if (failed_ || closed_) return;
  Notice notice = own_record(Notice::kRaise);
  store_text(notice.name, sizeof(notice.name), name);
  store_text(notice.text, sizeof(notice.text), text);
  try {
    if (!api_->ended()) notify_all(notice);
    if (!api_->ended()) flush(kRecordsWaitNs / 10);
  } catch (const Error&) {  // the transport no longer answers
  }
  set_failed(name, text);
}

void MessageEngine::poll() {
  check_usable();
  const std::lock_guard lock(mutex_);
  attempt([&] {
    receive_notices(kPeersPerLook);
    if (failed_) raise_failure();
    if (someone_fails_) conclude();
    check_connections();
  });
}

void MessageEngine::check_signals(Pulse pulse) {
  if (pulse != Pulse::kSlice || options_.check_signals == nullptr) return;
  if (!options_.check_signals(options_.context)) return;
  const std::lock_guard lock(mutex_);
  if (!failed_)
    fail_quietly(Cause::kInterrupt, "rank " + std::to_string(rank_) + " was interrupted");
  in_call_ = false;
  throw_error("Interrupted", "rank ", rank_, " was interrupted; its communicator is aborted");
}

bool MessageEngine::check(int32_t peer, Pulse pulse) {
  poll();
  check_signals(pulse);
  const std::lock_guard lock(mutex_);
  if (peer >= 0) return departed(static_cast<uint32_t>(peer));
  return peer == kAnyRank && world_size_ > 1 && others_departed();
}

MessageReport MessageEngine::report() const {
  if (!fork_guard_.at_home()) return {};
  const std::lock_guard lock(mutex_);
  return report_;
}

// MPI reports that some rank has died, not which. Finds out, a moment later if need be: one part of
// MPI may know it before the others.
std::string MessageEngine::name_dead_rank(const std::string& text) {
  const uint64_t until = now_ns() + kClosedGraceNs;
  int32_t dead = -1;
  wait_until(
      policy_, bell(),
      [&] {
        dead = link_.find_dead(departed_);
        return dead >= 0;
      },
      [&](Pulse) { return now_ns() >= until; });
  if (dead < 0) return text;
  const std::lock_guard lock(mutex_);
  departed_[static_cast<size_t>(dead)] = true;
  const Loss found = link_.loss(static_cast<uint32_t>(dead));
  const std::string who = "rank " + std::to_string(dead);
  return found.order ? who + " is lost (" + found.text + ")" : who + " has died (" + text + ")";
}

// What becomes of the exception that a part has thrown.
void MessageEngine::end_attempt() {
  let_go_of_held();  // it may take long
  try {
    try {
      throw;
    } catch (const Disagreement& found) {
      const std::lock_guard lock(mutex_);
      const EagerHeader& header = found.header;  // all that is known if the peer does not answer
      remember({found.peer, header.seq, header.descriptor, header.count, header.check});
      fail(Cause::kMismatch, found.peer);  // the transport may fail meanwhile
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
    if (failed_) raise_failure();  // a notice was faster
    const std::string text = kind == "PeerLost" ? name_dead_rank(error.what()) : error.what();
    raise_on_all(kind, text);
    told_ = true;
    throw Error(known_kind(kind), text);
  }
}

}  // namespace pycoll
