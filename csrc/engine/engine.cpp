// One iteration after the other: the gate, the flag lines, the steps of a plan.
#include "engine/engine.h"

#include <algorithm>
#include <cstring>

#include "kernels/fold/fold.h"

namespace pycoll {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

// Payload of the flag line in direct plans: where the rank's arrays lie in the heap, or in its own
// memory if the call is across. The check word distinguishes it from the bytes of a rank in another
// call. Calls with an alternative report times, whichever plan they run.
struct Payload {
  uint64_t in, out, check;
  ReportedTimes times;
  uint64_t checksum(uint32_t fingerprint) const {
    return in * 0x9E3779B97F4A7C15 ^ (out + fingerprint) * 0xBF58476D1CE4E5B9;
  }
};
static_assert(sizeof(Payload) <= kPayloadBytes);

void copy_all(const std::vector<Detours::Copy>& copies) {
  for (const Detours::Copy& c : copies) copy(c.to, c.from, c.nbytes);
}

}  // namespace

void Engine::begin_call(uint64_t descriptor, uint64_t count, uint32_t site, double timeout_s,
                        bool signals) {
  CallRecord& record = block_->records[++call_seq_ % kRecords];
  record.iteration.store(iteration(), kRelaxed);
  record.descriptor.store(descriptor, kRelaxed);
  record.count.store(count, kRelaxed);
  record.site.store(site, kRelaxed);
  record.done.store(0, kRelaxed);
  record.call_seq.store(call_seq_, kRelaxed);
  block_->call_seq.store(call_seq_, kRelaxed);
  descriptor_ = descriptor;
  count_ = count;
  timeout_s_ = timeout_s < 0 ? options_.timeout_s : timeout_s;
  deadline_.clear();
  signals_ = signals;
  published_ = false;
  if (faults_.pending()) [[unlikely]]
    throw_aborted();
}

void Engine::run_segments(const Job& job, const BoundCall& call) {
  fingerprint_ = call.fingerprint;
  begin_call(call.descriptor, call.count, job.site, job.timeout_s, job.signals);
  call_ = &call;
  in_ = static_cast<char*>(const_cast<void*>(job.in));
  out_ = static_cast<char*>(job.out);
  if (job.detours != nullptr) [[unlikely]]
    copy_all(job.detours->before);
  begin_results(call);
  for (uint32_t segment = 0; segment < call.segments; ++segment) {
    begin_iteration(job, segment);
    interpret(*call.plan);
    if (segment + 1 == call.segments) await_entry_of_all();
    end_iteration();
  }
  if (job.detours != nullptr) [[unlikely]]
    copy_all(job.detours->after);
  results_.end();
  block_->records[call_seq_ % kRecords].done.store(1, kRelaxed);
}

// Nobody returns from a call before every rank has entered it with the same arguments, even where
// the plan needs nothing of that rank: so every rank raises if one of them disagrees. Step 0 is
// enough: a plan that nobody waits for does not signal any other.
inline void Engine::await_entry_of_all() {
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    if (peers_[peer].seen < iteration()) await(peer, 0);
  }
}

// A new call ignores a refusal in the previous iteration; a call that goes on after it
// (`continuing`) has lost the rank that refused.
void Engine::gate(bool continuing) {
  const uint64_t previous = iteration() - 1;
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    if (peers_[peer].seen < previous) [[unlikely]]
      gate_peer(peer, continuing);
  }
}

void Engine::gate_peer(uint32_t peer, bool continuing) {
  const uint64_t previous = iteration() - 1;
  const FlagLine& line = control_->line(peer, previous & 1);
  switch (wait_for_line(peer, previous, 0, previous_fingerprint_)) {
    case PeerState::kReady:
      if (previous_failed_ || (line.descriptor.load(kRelaxed) == previous_descriptor_ &&
                               line.count.load(kRelaxed) == previous_count_)) {
        break;
      }
      [[fallthrough]];
    case PeerState::kMismatch:
      if (previous_failed_) break;
      faults_.raise(Cause::kMismatch, peer, previous);
    case PeerState::kFailed:
      if (continuing) peer_rejected(peer, false);
      break;
    case PeerState::kPending:
      faults_.raise(Cause::kLeft, peer, iteration(), "closed while others waited for it");
    case PeerState::kAhead:
      throw_ahead(peer);
  }
  peers_[peer].seen = previous;
}

// Writes the descriptor of this iteration to our line. The next publish makes it visible.
inline void Engine::open_line() {
  const uint64_t iteration = this->iteration();
  line_ = &control_->line(rank_, iteration & 1);
  position_ = position_of(iteration);
  step_ = 0;
  line_->descriptor.store(descriptor_, kRelaxed);
  line_->count.store(count_, kRelaxed);
}

void Engine::begin_iteration(const Job& job, uint32_t segment) {
  const BoundCall& call = *call_;
  published_ = false;
  gate(segment > 0);
  open_line();
  const uint32_t parity = iteration() & 1;
  if (call.plan->direct || choice_) fill_payload(job);
  start_ = segment * call.segment;
  reach_ = std::min(call.segment, call.largest - start_);
  if (call.tiny) {
    staging_ = reinterpret_cast<char*>(control_->line(0, parity).payload);
    staging_pitch_ = 2 * sizeof(FlagLine);
  } else {
    staging_ = control_->cell(0, parity);
    staging_pitch_ = 2 * control_->geometry().cell_bytes;
  }
}

void Engine::fill_payload(const Job& job) {
  Payload payload{job.in_offset, job.out_offset, 0, reported_};
  if (call_->across) {
    payload.in =
        reinterpret_cast<uintptr_t>(peer_memory_->readable_address(job.in, call_->in_bytes));
    payload.out = reinterpret_cast<uintptr_t>(job.out);
  }
  payload.check = payload.checksum(fingerprint_);
  std::memcpy(line_->payload, &payload, sizeof(payload));
}

void Engine::interpret(const Plan& plan) {
  const Operand* operands = plan.operands.data();
  for (const Instr& instr : plan.code) {
    switch (static_cast<Opcode>(instr.op)) {
      case Opcode::kFold:
        fold_pieces(instr, operands + instr.arg);
        break;
      case Opcode::kSignal:
        if (instr.arg == kDone) check_reads();
        publish(instr.arg);
        break;
      case Opcode::kWait:
        await(instr.peer, instr.arg);
        break;
      default:
        __builtin_unreachable();  // bind_call has refused the plan
    }
  }
}

// Peers of a direct call may ask whether we are done with their arrays; those of a staged call only
// ask, in the gate, whether we were there.
void Engine::end_iteration() {
  if (call_->plan->direct && step_ != kDone) check_reads();
  if ((call_->plan->direct && step_ != kDone) || !published_) publish(kDone);
  if (call_->scale_at_exit && out_ != nullptr) scale_out();
  close_iteration(false);
}

// Before we say that we are done with our peers' arrays: they leave a call in order only when they
// have heard that, so one that has left has failed, and may have changed what we were reading. The
// fence keeps the reads before the look at the abort word.
inline void Engine::check_reads() {
  std::atomic_thread_fence(std::memory_order_acquire);
  if (faults_.pending()) [[unlikely]]
    throw_aborted();
}

inline void Engine::close_iteration(bool failed) {
  previous_failed_ = failed;
  previous_descriptor_ = descriptor_;
  previous_count_ = count_;
  previous_fingerprint_ = fingerprint_;
  const uint64_t next = iteration() + 1;
  iteration_.store(next, kRelaxed);
}

inline void Engine::publish(uint32_t step) {
  const uint64_t position = position_ | step;
  line_->flag.store(position << 32 | fingerprint_, std::memory_order_seq_cst);
  step_ = step;
  published_ = true;
  ring(control_->bell(rank_, position_ >> 16 & 1));
}

inline Engine::PeerState Engine::classify(uint64_t flag, uint32_t want, uint32_t fingerprint) {
  const auto position = static_cast<uint32_t>(flag >> 32);
  const auto ahead = static_cast<int32_t>(position - want);
  if (ahead >= 0 && static_cast<uint32_t>(flag) == fingerprint) return PeerState::kReady;
  if ((position ^ want) >> 16 != 0) return ahead > 0 ? PeerState::kAhead : PeerState::kPending;
  if ((position & 0xFFFF) == kFailed) return PeerState::kFailed;
  return static_cast<uint32_t>(flag) == fingerprint ? PeerState::kPending : PeerState::kMismatch;
}

inline void Engine::await(uint32_t peer, uint32_t step) {
  const FlagLine& line = control_->line(peer, position_ >> 16 & 1);
  const uint64_t flag = line.flag.load(std::memory_order_acquire);
  if (classify(flag, position_ | step, fingerprint_) != PeerState::kReady) await_slow(peer, step);
  if (peers_[peer].seen != iteration()) compare_calls(peer);
}

void Engine::await_slow(uint32_t peer, uint32_t step) {
  if (!published_) publish(0);  // two ranks that wait for each other must see each other's call
  PeerState sight = PeerState::kReady;
  if (choice_ && choice_->timed() && peers_[peer].seen < first_iteration_) {
    entry_wait_ns_ -= now_ns();
    sight = wait_for_line(peer, iteration(), 0, fingerprint_);
    entry_wait_ns_ += now_ns();
  }
  if (sight == PeerState::kReady) sight = wait_for_line(peer, iteration(), step, fingerprint_);
  switch (sight) {
    case PeerState::kReady:
      return;
    case PeerState::kMismatch:
      faults_.raise(Cause::kMismatch, peer, iteration());
    case PeerState::kFailed:
      peer_rejected(peer, true);
    case PeerState::kPending:
      faults_.raise(Cause::kLeft, peer, iteration(), "closed while others waited for it");
    case PeerState::kAhead:
      throw_ahead(peer);
  }
}

inline void Engine::done_waiting() {
  if (waiting_ != 0) end_of_wait();
}

// Waits until the line of a peer says something about an iteration. kPending: the peer has closed.
Engine::PeerState Engine::wait_for_line(uint32_t peer, uint64_t iteration, uint32_t step,
                                        uint32_t fingerprint) {
  const uint32_t parity = iteration & 1, want = position_of(iteration) | step;
  const FlagLine& line = control_->line(peer, parity);
  PeerState sight = PeerState::kPending;
  const auto ready = [&] {
    sight = classify(line.flag.load(std::memory_order_acquire), want, fingerprint);
    return sight != PeerState::kPending;
  };
  const WaitPolicy& policy = attended_ ? attend(peer) : policy_;
  wait_until(policy, control_->bell(peer, parity), ready, [&](Pulse pulse) {
    if (other_work_) other_work_();
    return check_call(peer, want, pulse);
  });
  done_waiting();
  return sight;
}

bool Engine::check_call(uint32_t peer, uint32_t position, Pulse pulse) {
  if (faults_.pending()) throw_aborted();
  faults_.check_peers(iteration());
  const uint64_t now = now_ns();
  if ((waiting_ & kNoted) == 0) {
    waiting_ |= kNoted;
    if (traced_.wait_begin != 0 && (waiting_ & kTimed) == 0) {
      // A tiny call does nothing but wait, since it began or since its last wait: two readings of
      // the clock less, where no wait takes long.
      traced_.peer = peer;
      waiting_ |= kTimed;
    }
    block_->waiting_position.store(position, kRelaxed);
    // Since when the call waits, as its time limit counts: maybe for another peer at first.
    if (!deadline_.is_set()) block_->waiting_since_ns.store(now, kRelaxed);
    block_->waiting_peer.store(static_cast<int32_t>(peer), std::memory_order_release);
  }
  if (!deadline_.is_set()) deadline_ = Deadline(timeout_s_);
  if (deadline_.passes()) {
    faults_.raise(Cause::kTimeout, faults_.last_in_chain(peer), iteration());
  }
  if (signals_) check_signals(pulse);
  return faults_.closed(peer);
}

void Engine::compare_calls(uint32_t peer) {
  const FlagLine& line = control_->line(peer, iteration() & 1);
  if (line.descriptor.load(kRelaxed) != descriptor_ || line.count.load(kRelaxed) != count_) {
    faults_.raise(Cause::kMismatch, peer, iteration());
  }
  peers_[peer].seen = iteration();
  if (call_->plan->direct || choice_) read_payload(peer, line);
}

void Engine::read_payload(uint32_t peer, const FlagLine& line) {
  Payload payload;
  std::memcpy(&payload, line.payload, sizeof(payload));
  if (payload.check != payload.checksum(fingerprint_)) {
    faults_.raise(Cause::kMismatch, peer, iteration());
  }
  if (choice_) choice_->add(payload.times);
  if (!call_->plan->direct) return;
  peers_[peer].in = call_->across ? reinterpret_cast<char*>(payload.in) : heap_->at(payload.in);
  peers_[peer].out = call_->across ? reinterpret_cast<char*>(payload.out) : heap_->at(payload.out);
}

// An abort is pending. If ranks disagree on this very iteration, show what we wanted: the first
// time only. A later call is in the same iteration, and may be just what a peer still waits for.
void Engine::throw_aborted() {
  const AbortWord word = faults_.word();
  const bool shown = has_reached(control_->line(rank_, iteration() & 1), position_of(iteration()));
  if (word.cause == Cause::kMismatch && word.iteration == (iteration() & 0xFFFF) && !shown) {
    open_line();
    publish(0);
  }
  faults_.throw_pending();
}

// A line that is two iterations ahead of us is possible only after an abort.
void Engine::throw_ahead(uint32_t peer) {
  if (faults_.pending()) throw_aborted();
  throw_error("TransportError", "rank ", peer, " is ahead of rank ", rank_, " in iteration ",
              iteration(), ": the control segment is corrupt");
}

// `peer` gave up the running iteration (`entered`), or the one before it. Passes it on to the
// ranks that wait for us, and leaves the iteration when no peer uses our arrays any more.
void Engine::peer_rejected(uint32_t peer, bool entered) {
  const uint32_t parity = (iteration() - (entered ? 0 : 1)) & 1;
  const int32_t origin = control_->block(peer).refusal[parity].origin.load(kRelaxed);
  const std::string text = control_->block(uint32_t(origin)).refusal[parity].text;
  if (entered) {
    Refusal& own = block_->refusal[parity];
    own.iteration.store(iteration(), kRelaxed);
    own.origin.store(origin, kRelaxed);
    fingerprint_ = 0;
    publish(kFailed);
    if (call_->plan->direct) quiesce();
    close_iteration(true);
  }
  throw_error("PeerRejected", "rank ", origin, " refused its arguments for this call: ", text);
}

void Engine::quiesce() {
  const uint32_t parity = iteration() & 1, want = position_ | kDone;
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const FlagLine& line = control_->line(peer, parity);
    const auto left = [&] { return has_reached(line, want); };
    wait_until(policy_, control_->bell(peer, parity), left,
               [&](Pulse pulse) { return check_call(peer, want, pulse); });
    done_waiting();
  }
}

void Engine::execute_refusal(std::string_view text, uint32_t site, double timeout_s, bool signals) {
  fingerprint_ = 0;
  begin_call(kRefusedDescriptor, 0, site, timeout_s, signals);
  gate(false);
  open_line();
  Refusal& refusal = block_->refusal[iteration() & 1];
  store_text(refusal.text, kRefusalBytes, text);
  refusal.iteration.store(iteration(), kRelaxed);
  refusal.origin.store(static_cast<int32_t>(rank_), kRelaxed);
  publish(kFailed);
  close_iteration(true);
}

}  // namespace pycoll
