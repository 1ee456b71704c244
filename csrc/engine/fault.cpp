#include "engine/fault.h"

#include <cstring>
#include <sstream>

#include "base/liveness.h"
#include "engine/plan.h"

namespace pycoll {
namespace {

constexpr uint64_t kReportLimitNs = 1'000'000'000;  // how long to wait for another's report
constexpr uint64_t kOthersLimitNs = 200'000'000;    // how long a report waits for others to enter

std::string in_words(const MessageKind& kind) {
  if (kind.type == kObjectType) return "an object";
  return std::to_string(kind.nbytes) + " bytes of " + type_name(kind.type);
}

const char* headline(Cause cause) {
  switch (cause) {
    case Cause::kMismatch:
      return "made another call than its peers";
    case Cause::kLost:
      return "died";
    case Cause::kLeft:
      return "left the communicator";
    case Cause::kTimeout:
      return "did not do its part in time";
    case Cause::kInterrupt:
      return "was interrupted";
    default:
      return "aborted the communicator";
  }
}

}  // namespace

const char* kind_of(Cause cause) {
  switch (cause) {
    case Cause::kMismatch:
      return "MismatchError";
    case Cause::kLost:
      return "PeerLost";
    case Cause::kLeft:
      return "PeerLeft";
    case Cause::kTimeout:
      return "CollTimeout";
    default:
      return "Revoked";
  }
}

Aborted::Aborted(Cause cause, const std::string& text)
    : Error(kind_of(cause), text), cause_(cause) {}

std::string rank_name(int32_t rank) {
  return rank < 0 ? "any rank" : "rank " + std::to_string(rank);
}

std::string message_text(bool incoming, uint32_t rank, int32_t peer, uint32_t tag,
                         uint64_t nbytes) {
  std::ostringstream out;
  out << (incoming ? "recv on rank " : "send from rank ") << rank << (incoming ? " from " : " to ")
      << rank_name(peer) << " (tag " << tag << ", " << nbytes << " bytes)";
  return out.str();
}

void throw_nothing_came(uint32_t rank, int32_t src, uint32_t tag, double timeout_s) {
  throw_error("CollTimeout", "recv on rank ", rank, " (tag ", tag, "): nothing from ",
              rank_name(src), " within ", timeout_s, " s");
}

void throw_mismatch(uint32_t rank, uint32_t tag, const MessageKind& expected, uint32_t src,
                    const MessageKind& sent) {
  throw_error("MismatchError", "recv on rank ", rank, " (tag ", tag, ") expects ",
              in_words(expected), "; rank ", src, " sent ", in_words(sent),
              ". The message is kept: receive it ",
              sent.type == kObjectType ? "with recv_object" : "into a fitting array");
}

const char* closed_text(int32_t rank) {
  return rank < 0 ? ": all other ranks have closed their communicators, or have ended"
                  : ": the peer has closed its communicator, or its program has ended";
}

std::string describe(const Report& report) {
  std::ostringstream out;
  out << "rank " << report.culprit << ' ' << headline(report.cause);
  if (!report.text.empty()) out << " (" << report.text << ")";
  out << "; iteration " << report.iteration << ", reported by rank " << report.reporter;
  if (!report.complete) out << ", which did not finish its report";
  return out.str();
}

Faults::Faults(std::shared_ptr<ControlSegment> control, uint32_t rank, bool threads_as_ranks)
    : control_(std::move(control)),
      word_(&control_->abort_block().word),
      rank_(rank),
      threads_(threads_as_ranks) {}

void Faults::set(Cause cause, uint32_t culprit, uint64_t iteration, std::string_view text) {
  const AbortWord word{cause, uint16_t(culprit), uint16_t(rank_), uint16_t(iteration)};
  uint64_t none = 0;
  if (!word_->compare_exchange_strong(none, word.pack())) return;
  if (cause == Cause::kMismatch) await_others(iteration);
  publish_report(iteration, text);
}

void Faults::raise(Cause cause, uint32_t culprit, uint64_t iteration, std::string_view text) {
  set(cause, culprit, iteration, text);
  throw_pending();
}

void Faults::throw_pending() {
  const Report snapshot = report();
  throw Aborted(snapshot.cause, describe(snapshot));
}

void Faults::publish_report(uint64_t iteration, std::string_view text) {
  AbortBlock& block = control_->abort_block();
  block.iteration = iteration;
  store_text(block.text, kTextBytes, text);
  for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
    fill(rank, iteration, control_->report(rank));
  }
  block.ready.store(1, std::memory_order_seq_cst);
  control_->wake_everybody();
}

// Writes the report if the rank that set the abort word, or took over from it, died before it had.
void Faults::take_over(const AbortWord& word) {
  AbortBlock& block = control_->abort_block();
  uint32_t taken_over = block.taken_over.load(std::memory_order_acquire);
  const uint32_t writer = taken_over == 0 ? word.reporter : taken_over - 1;
  if (threads_ || writer == rank_ || !owner_died(&control_->block(writer).liveness)) return;
  if (!block.taken_over.compare_exchange_strong(taken_over, rank_ + 1)) return;
  // The word has the iteration modulo 2^16; ours is at most one away from it.
  const RankBlock& own = control_->block(rank_);
  const CallRecord& call = own.records[own.call_seq.load() % kRecords];
  const uint64_t near = call.iteration.load(std::memory_order_relaxed);
  publish_report(near + static_cast<int16_t>(word.iteration - static_cast<uint16_t>(near)), {});
}

// Ranks that come to this iteration later show what they wanted to call before they raise.
void Faults::await_others(uint64_t iteration) {
  const uint64_t until = now_ns() + kOthersLimitNs;
  const auto entered = [&] {
    for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
      if (!has_reached(control_->line(rank, iteration & 1), position_of(iteration))) return false;
    }
    return true;
  };
  wait_until(kPatient, Bell{}, entered, [&](Pulse) { return now_ns() > until; });
}

void Faults::fill(uint32_t rank, uint64_t iteration, RankReport& entry) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  RankBlock& block = control_->block(rank);
  const ProcessStat stat = process_stat(block.pid.load(kRelaxed));
  entry.phase = block.phase.load(std::memory_order_acquire);
  entry.alive = threads_ || !(owner_died(&block.liveness) || control_->died_joining(rank));
  entry.state = stat.starttime == block.starttime.load(kRelaxed) ? stat.state : '?';
  entry.pid = block.pid.load(kRelaxed);
  const CallRecord* record = nullptr;  // the newest call that began no later than this iteration
  for (const CallRecord& other : block.records) {
    const uint64_t seq = other.call_seq.load(kRelaxed);
    if (seq == 0 || other.iteration.load(kRelaxed) > iteration) continue;
    if (record == nullptr || seq > record->call_seq.load(kRelaxed)) record = &other;
  }
  if (record != nullptr) {
    entry.call_seq = record->call_seq.load(kRelaxed);
    entry.iteration = record->iteration.load(kRelaxed);
    entry.descriptor = record->descriptor.load(kRelaxed);
    entry.count = record->count.load(kRelaxed);
    store_text(entry.site, kSiteBytes, control_->site_text(rank, record->site.load(kRelaxed)));
  }
  const FlagLine& line = control_->line(rank, iteration & 1);
  for (uint32_t parity = 0; parity < 2; ++parity) {
    entry.flag[parity] = control_->line(rank, parity).flag.load(std::memory_order_acquire);
  }
  const uint64_t flag = entry.flag[iteration & 1];
  entry.entered = flag >> 48 == (iteration & 0xFFFF);
  if (entry.entered) {
    entry.descriptor = line.descriptor.load(kRelaxed);
    entry.count = line.count.load(kRelaxed);
  }
  entry.waiting_peer = block.waiting_peer.load(std::memory_order_acquire);
  entry.waiting_step = block.waiting_position.load(kRelaxed) & 0xFFFF;
  const uint64_t since = block.waiting_since_ns.load(kRelaxed), now = now_ns();
  entry.waiting_ns = entry.waiting_peer >= 0 && now > since ? now - since : 0;
  const Refusal& refusal = block.refusal[iteration & 1];
  if (Phase(entry.phase) == Phase::kLeft) {
    store_text(entry.text, kTextBytes, block.leave_text);
  } else if (entry.entered && (flag >> 32 & 0xFFFF) == kFailed &&
             refusal.origin.load(kRelaxed) == int32_t(rank)) {
    store_text(entry.text, kTextBytes, refusal.text);
  }
}

void Faults::check_peers(uint64_t iteration) {
  if (pending()) throw_pending();
  for (uint32_t peer = 0; peer < control_->geometry().world_size; ++peer) {
    if (peer == rank_) continue;
    RankBlock& block = control_->block(peer);
    const Phase phase = Phase(block.phase.load(std::memory_order_acquire));
    if (phase == Phase::kLeft) raise(Cause::kLeft, peer, iteration, block.leave_text);
    if (threads_ || phase == Phase::kClosed) continue;
    if (owner_died(&block.liveness) || control_->died_joining(peer)) {
      raise(Cause::kLost, peer, iteration);
    }
  }
}

bool Faults::closed(uint32_t peer) const {
  return Phase(control_->block(peer).phase.load(std::memory_order_acquire)) == Phase::kClosed;
}

bool Faults::others_closed() const {
  const uint32_t world_size = control_->geometry().world_size;
  for (uint32_t peer = 0; peer < world_size; ++peer) {
    if (peer != rank_ && !closed(peer)) return false;
  }
  return world_size > 1;
}

uint32_t Faults::last_in_chain(uint32_t peer) const {
  for (uint32_t hop = 0; hop < control_->geometry().world_size; ++hop) {
    const RankBlock& block = control_->block(peer);
    const int32_t next = block.waiting_peer.load(std::memory_order_acquire);
    if (next < 0 || next == int32_t(rank_)) break;
    const uint32_t position = block.waiting_position.load(std::memory_order_relaxed);
    // What it waits for is there: this one itself does not move.
    if (has_reached(control_->line(uint32_t(next), position >> 16 & 1), position)) break;
    peer = uint32_t(next);
  }
  return peer;
}

Report Faults::report() {
  const uint64_t word = word_->load(std::memory_order_acquire);
  if (word == 0) return {};
  AbortBlock& block = control_->abort_block();
  const AbortWord abort = AbortWord::unpack(word);
  const uint64_t until = now_ns() + (gave_up_.load() ? 0 : kReportLimitNs);
  const auto ready = [&] { return block.ready.load(std::memory_order_acquire) != 0; };
  const bool complete = wait_until(kPatient, control_->report_bell(), ready, [&](Pulse) {
    take_over(abort);
    return now_ns() > until;
  });
  if (!complete) gave_up_.store(true);
  std::lock_guard lock(mutex_);
  if (report_.complete) return report_;
  report_.cause = abort.cause;
  report_.culprit = abort.culprit;
  report_.reporter = abort.reporter;
  report_.iteration = abort.iteration;
  report_.complete = complete;
  if (complete) {
    report_.iteration = block.iteration;
    report_.text = block.text;
    for (uint32_t rank = 0; rank < control_->geometry().world_size; ++rank) {
      report_.ranks.push_back(control_->report(rank));
    }
  }
  return report_;
}

}  // namespace pycoll
