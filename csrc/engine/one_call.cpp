// A call as a whole: which plan it runs, and leaving it after a failure.
#include "engine/engine.h"

namespace pycoll {
namespace {

constexpr size_t kMaxChoices = 1024;
constexpr uint64_t kPartNs = 500'000'000;

}  // namespace

void Engine::execute(const Job& job) {
  if (job.call->alternative != nullptr) return run_chosen(job);
  choice_.reset();
  run_call(job, *job.call);
}

// Runs a call that has an alternative, or the alternative.
void Engine::run_chosen(const Job& job) {
  const uint32_t key = job.call->fingerprint;
  const auto known = choices_.find(key);
  choice_ = known == choices_.end() ? CopyChoice{} : known->second;
  told_ = choice_->begin(peer_memory_ != nullptr && peer_memory_->able());
  const uint64_t begin = choice_->timed() ? now_ns() : 0;
  met_since_ = iteration();
  late_ns_ = 0;
  run_call(job, choice_->reads() ? *job.call->alternative : *job.call);
  if (peer_memory_ != nullptr) peer_memory_->probe();
  choice_->end(choice_->timed() ? now_ns() - begin - late_ns_ : 0);
  // Only calls that have succeeded count, so all ranks remember, and forget, the same.
  if (known == choices_.end() && choices_.size() == kMaxChoices) choices_.clear();
  choices_.insert_or_assign(key, *choice_);
}

bool Engine::reads(const BoundCall& call) const {
  const auto known = choices_.find(call.fingerprint);
  return known != choices_.end() && known->second.reads();
}

void Engine::run_call(const Job& job, const BoundCall& call) {
  if (!call.plan->direct) return run_segments(job, call);
  block_->inside.store(iteration(), std::memory_order_seq_cst);  // before it looks for an abort
  try {
    run_segments(job, call);
  } catch (...) {
    part();
    throw;
  }
  block_->inside.store(0, std::memory_order_release);
}

// Leaves a direct call that has failed. Peers may be reading and writing our arrays, which belong
// to the caller again when we return: those who are in the call get the time to notice and to
// leave. Who does not, because it is stopped, may go on with what it was doing at any time: what
// our arrays lie in is not used for others. After a refusal all have left; see quiesce.
void Engine::part() {
  const uint64_t call = block_->inside.exchange(0, std::memory_order_seq_cst);
  const bool entered = published_ && step_ >= kEntered;
  if (iteration() == call && !entered) return;  // nobody has been told where our arrays are
  if (!faults_.pending()) return;
  const uint64_t end = now_ns() + kPartNs;
  bool alone = true;
  for (uint32_t peer = 0; peer < world_size_; ++peer) {
    const auto& inside = control_->block(peer).inside;
    alone &= wait_until(
        kPatient, control_->bell(peer, 0),
        [&] {
          return inside.load(std::memory_order_seq_cst) != call ||
                 life_lost(&control_->block(peer).life);
        },
        [&](Pulse) { return now_ns() >= end; });
  }
  if (!alone && heap_ != nullptr) heap_->distrust();
}

}  // namespace pycoll
