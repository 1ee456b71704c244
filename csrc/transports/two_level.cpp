#include "transports/two_level.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace pycoll {
namespace {

constexpr double kOwnerFirst = 3.0;  // s; who waits for another host knows better why it takes long
constexpr size_t kStages = 1024;     // of one call, inside a host

// What shows which call this is; null if this rank has no part in it.
const BoundCall* first_call(const StagedCall& call) {
  const StagedSlice& slice = call.slices.front();
  for (const BoundStage* stage : {&slice.before, &slice.across, &slice.between, &slice.after}) {
    if (stage->call != nullptr) return stage->call.get();
  }
  return nullptr;
}

}  // namespace

TwoLevelEngine::TwoLevelEngine(std::shared_ptr<Engine> node, std::shared_ptr<MessageEngine> flat)
    : node_(std::move(node)), flat_(std::move(flat)) {
  node_->set_other_work([engine = flat_.get()] { return engine->progress_batch(); });
  flat_->set_end_wait([node = node_.get()] { node->abort("a rank on another host has failed"); });
  if (flat_->board() != nullptr) flat_->board()->set_inside(node_->control().cookie());
}

TwoLevelEngine::~TwoLevelEngine() {
  node_->set_other_work(nullptr);
  flat_->set_end_wait(nullptr);
  if (flat_->failed()) scratch_.release();  // MPI may still look at it
}

uint32_t TwoLevelEngine::site(std::string_view text) {
  const uint32_t id = flat_->site(text);
  if (node_sites_.size() <= id) node_sites_.resize(id + 1);
  node_sites_[id] = node_->site(text);
  return id;
}

void TwoLevelEngine::run(const StagedCall& call, const void* in, void* out, uint32_t site,
                         double timeout_s) {
  if (!flat_->at_home()) flat_->check_usable();
  flat_->check_mpi();
  const Use use(user_, flat_->link().rank());
  const BoundCall* first = first_call(call);
  const uint64_t descriptor = first == nullptr ? 0 : first->descriptor;
  const uint64_t count = first == nullptr ? 0 : first->count;
  flat_->show(descriptor, count, site);
  const auto iteration = static_cast<uint32_t>(flat_->iteration());
  if (trace_ != nullptr) trace_->begin(descriptor, count);
  const uint64_t enter = trace_ == nullptr ? 0 : ticks();
  const auto note = [&](uint32_t failed) {
    flat_->shown(failed == 0);
    if (trace_ == nullptr) return;
    const uint64_t leave = ticks();
    trace_->end();
    uint64_t waited = flat_->count_waits(true);
    TraceRecord stage;
    while (stages_->take(&stage, 1) != 0) waited += stage.waited;
    TraceRecord& record = trace_->open();
    record = {.enter = enter,
              .leave = leave,
              .descriptor = descriptor,
              .count = count,
              .waited = std::min(waited, leave - enter),
              .iteration = iteration,
              .site = static_cast<uint16_t>(site | failed),
              .awaited = TraceRecord::kNobody};
    trace_->close(record);
  };
  try {
    run_staged(call, in, out, site, timeout_s);
  } catch (...) {
    note(TraceRecord::kFailed);
    throw;
  }
  note(0);
}

void TwoLevelEngine::trace(std::shared_ptr<Trace> trace) {
  const Use use(user_, flat_->link().rank());
  stages_ = trace == nullptr ? nullptr : std::make_shared<Trace>(kStages);
  node_->trace(stages_);
  flat_->count_waits(trace != nullptr);
  trace_ = std::move(trace);
}

void TwoLevelEngine::run_staged(const StagedCall& call, const void* in, void* out, uint32_t site,
                                double timeout_s) {
  const uint32_t here = site < node_sites_.size() ? node_sites_[site] : 0;
  const double limit_s = timeout_s < 0 ? flat_->timeout_s() : timeout_s;
  inside_ = counted_ = false;
  try {
    if (scratch_bytes_ < call.scratch_bytes) {
      if (flat_->failed()) flat_->poll();  // raises; MPI may still look at what there is
      scratch_ = std::make_unique_for_overwrite<char[]>(call.scratch_bytes);
      scratch_bytes_ = call.scratch_bytes;
    }
    run_slices(call, {{const_cast<void*>(in), out, scratch_.get()}, here, site, limit_s});
  } catch (const Error& error) {
    flat_->cancel_batch();  // the failure may be one inside the host
    if (std::string_view(error.kind()) == "PeerRejected") rejected(call, error.what());
    throw;
  } catch (const std::bad_alloc&) {
    flat_->cancel_batch();
    inside_ = false;  // the other hosts hear of it here, and this one from whoever catches it
    flat_->out_of_memory();
  }
}

void TwoLevelEngine::run_slices(const StagedCall& call, const Arrays& arrays) {
  const std::vector<StagedSlice>& slices = call.slices;
  const bool owner = slices.front().across.call != nullptr;
  for (const BoundStage* stage : {&slices.front().before, &slices.front().after}) {
    if (stage->call == nullptr) continue;
    flat_->enter(stage->call->descriptor, stage->call->count, arrays.there);
    break;
  }
  for (size_t i = 0; i < slices.size() + kBatch; ++i) {
    const bool fetch = i >= kBatch && i - kBatch < slices.size();
    const double more_s = i == 0 ? 0.0 : kOwnerFirst;
    if (i < slices.size()) run_inside(slices[i].before, arrays, more_s);
    if (owner && fetch) flat_->finish();
    if (i < slices.size()) {
      if (owner) start(slices[i].across, arrays);
      run_inside(slices[i].between, arrays, more_s);
    }
    if (fetch) run_inside(slices[i - kBatch].after, arrays, kOwnerFirst);
  }
  for (size_t i = 0; i < slices.size() && !owner; ++i) flat_->skip();
}

void TwoLevelEngine::run_inside(const BoundStage& stage, const Arrays& arrays, double more_s) {
  if (stage.call == nullptr) return;
  inside_ = true;
  node_->run(*stage.call, arrays.at[size_t(stage.source)], arrays.at[size_t(stage.target)],
             arrays.here, arrays.timeout_s + more_s);
  inside_ = false;
}

void TwoLevelEngine::start(const BoundStage& stage, const Arrays& arrays) {
  counted_ = true;
  flat_->start(*stage.call, arrays.at[size_t(stage.source)], arrays.at[size_t(stage.target)],
               arrays.there, arrays.timeout_s);
}

// Whoever hears of it from its host has not counted the call; whoever hears of it from another host
// tells its own.
void TwoLevelEngine::rejected(const StagedCall& call, std::string_view text) {
  const bool inside = inside_;
  if (!inside && call.hosts_first) node_->refuse(text, 0);
  if (!counted_) flat_->skip();
  flat_->await_refusal();
  inside_ = inside;
}

}  // namespace pycoll
