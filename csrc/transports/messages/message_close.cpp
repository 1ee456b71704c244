// How a communicator over messages ends on one rank: by leaving it, or by closing it.
#include "transports/messages/message_engine.h"

namespace pycoll {

namespace {

constexpr uint64_t kNoticeFlushNs = 1'000'000'000;

}  // namespace

void MessageEngine::leave(std::string_view text) {
  if (!fork_guard_.at_home() || closed_ || left_ || api_->ended()) return;
  const std::lock_guard lock(mutex_);
  left_ = true;
  if (board_ != nullptr) board_->leave(Phase::kLeft, text);
  Notice notice = own_record(Notice::kLeft);
  store_text(notice.text, sizeof(notice.text), text);
  notify_all(notice);
  flush(kNoticeFlushNs, true);
  if (failed_) return;
  records_[rank_] = notice;  // calls in the queue end, too
  report_ = {Cause::kLeft, rank_, rank_, seq_, notice.text, records_};
  set_failed(kind_of(Cause::kLeft), notice.text);
}

void MessageEngine::check_unused() const {
  if (fork_guard_.at_home()) Use::check_unused(user_, rank_);
}

void MessageEngine::close() {
  if (!fork_guard_.at_home()) {
    if (helper() != nullptr) helper()->abandon();
    closed_ = true;
    return;
  }
  const Use use(user_, rank_);
  if (closed_) return;
  const bool usable = !api_->ended();
  if (usable) settle();
  closed_ = true;
  if (board_ != nullptr) board_->leave(Phase::kClosed);
  const std::lock_guard lock(mutex_);
  if (!left_ && !failed_ && usable) {
    notify_all(own_record(Notice::kClosed));
    flush(kNoticeFlushNs, true);
    const uint64_t until = now_ns() + kClosingNs;  // MPI reports what nobody has received
    try {
      wait_until(
          policy_, bell(),
          [&] {
            receive_notices(kPeersPerLook);
            if (stale_until_seq_ > 0) link_.drop_before(seq_);
            return others_departed();
          },
          [&](Pulse) { return now_ns() >= until; });
    } catch (const Error&) {  // somebody has died, which no longer matters
    }
  }
  if (helper() != nullptr) helper()->stop();
}

void MessageEngine::prove() {
  if (!fork_guard_.at_home() || closed_ || left_ || api_->ended()) return;
  const Use use(user_, rank_);
  settle();
  {
    const std::lock_guard lock(mutex_);
    if (unproven_.empty() || told_) return;
  }
  const uint64_t since = now_ns();
  attempt([&] {
    {
      const std::lock_guard lock(mutex_);
      notify_all(own_record(Notice::kClosed));
    }
    wait_until(
        policy_, bell(),
        [&] {
          const std::lock_guard lock(mutex_);
          receive_notices(kPeersPerLook);
          return first_unproven() < 0;
        },
        [&](Pulse pulse) {
          check_proof(pulse, since);
          return false;
        });
  });
  const std::lock_guard lock(mutex_);
  unproven_.clear();
}

// A rank that has not yet shown that it has made the last of the calls that this one has left
// early, and so all of them; -1 if there is none.
int32_t MessageEngine::first_unproven() const {
  const PastCall& last = unproven_.all().back();
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    const PastCall* call = past(rank, last.seq);
    if (call == nullptr || call->differs(last)) return static_cast<int32_t>(rank);
  }
  return -1;
}

// Raises what keeps a rank from making the calls that this one has left early.
void MessageEngine::check_proof(Pulse pulse, uint64_t since_ns) {
  const std::lock_guard lock(mutex_);
  const int32_t found = first_unproven();
  if (found < 0) return;
  const auto rank = static_cast<uint32_t>(found);
  if (failed_) raise_failure();
  for (const Notice& record : records_) {  // of later calls this rank is no part
    const bool fails = record.kind == Notice::kRecord && record.cause != 0;
    if (fails && first_suspect(record) < seq_) conclude();
  }
  check_connections();
  compare();
  const uint64_t now = now_ns();
  if (departed(rank) && now - since_ns >= kClosingNs) {
    fail(Cause::kLeft, rank, "it closed its communicator before it made a call of the others");
  }
  if (now >= since_ns + static_cast<uint64_t>(options_.timeout_s * 1e9)) {
    told_ = true;
    throw_error("CollTimeout", "rank ", rank_, " has left calls early, the last one at ",
                site_text(unproven_.all().back().site), ", and cannot know whether rank ", rank,
                " has made them: it has not closed its communicator within ", options_.timeout_s,
                " s");
  }
  check_signals(pulse);
}

std::vector<PastCall> MessageEngine::unproven() const {
  if (!fork_guard_.at_home()) return {};
  const std::lock_guard lock(mutex_);
  std::vector<PastCall> calls = unproven_.all();
  for (PastCall& call : calls) call.site_text = site_text(call.site);
  return calls;
}

bool MessageEngine::others_departed() const {
  uint32_t here = 0;
  for (uint32_t peer = 0; peer < world_size_; ++peer) here += !departed(peer);
  return here <= 1;
}

// Waits until notices have left, and messages of users if this rank leaves. Eager messages of calls
// have left when the calls ended, or nobody wants them.
void MessageEngine::flush(uint64_t patience_ns, bool mail) {
  const uint64_t until = now_ns() + patience_ns;
  const auto sent = [&] {
    try {
      return link_.notices_sent(mail);
    } catch (const Error&) {  // a receiver has died; the others still want theirs
      return false;
    }
  };
  wait_until(policy_, bell(), sent, [&](Pulse) { return now_ns() >= until; });
}

}  // namespace pycoll
