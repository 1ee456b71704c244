// Running calls over MPI: one after the other, or as a train of which several are under way at
// once.
#include <algorithm>
#include <utility>

#include "transports/messages/message_engine.h"

namespace pycoll {
namespace {

constexpr uint32_t kStepsBetweenChecks = 1024;
constexpr uint32_t kYieldsBetweenChecks = 16;
constexpr uint64_t kAnswerNs = 5'000'000;
constexpr uint64_t kLookBackBytes = 64 << 10;  // a look at every peer costs as much as some KiB

}  // namespace

void MpiEngine::execute(const Job& job, bool signals) {
  on_train([&] {
    add_to_train(job, signals);
    drive([this] { return train_.front().over; });
    look_back(*job.call);
  });
  const std::lock_guard lock(mutex_);  // notices come on threads that wait for messages, too
  train_.clear();
  end();
}

// Puts a call behind those under way, and lets it begin.
void MpiEngine::add_to_train(const Job& job, bool signals) {
  const std::lock_guard lock(mutex_);
  if (train_.empty()) begin(job, signals);
  const uint32_t place = train_.empty() ? 0 : (train_.back().place + 1) % kTrain;
  train_.push_back({make_task(job, seq_ + train_.size(), place), job.call->tiny, false, place});
  advance_train();
}

void MpiEngine::advance_train() {
  for (Car& car : train_) {
    const uint64_t before = car.task->progress();
    if (!car.over) car.over = car.task->advance();
    moved_ += car.task->progress() - before;
  }
}

// Moves the train until something is ready.
void MpiEngine::drive(const std::function<bool()>& ready) {
  uint32_t steps = 0, yields = 0;
  const auto check = [&](Pulse pulse) {
    const std::lock_guard lock(mutex_);
    const auto late = [](const Car& car) { return !car.over; };
    const auto car = std::find_if(train_.begin(), train_.end(), late);
    check_call(car == train_.end() ? *train_.back().task : *car->task, pulse);
    return false;
  };
  for (bool found = ready(); !found;) {
    const uint64_t before = moved_;
    wait_until(
        policy_, Bell{},
        [&] {
          const std::lock_guard lock(mutex_);
          advance_train();
          found = ready();
          return found || moved_ != before;
        },
        [&](Pulse pulse) {
          const bool skipped = pulse == Pulse::kYield && ++yields % kYieldsBetweenChecks != 0;
          return skipped ? false : check(pulse);
        });
    if (!found && ++steps % kStepsBetweenChecks == 0) check(Pulse::kSlice);
  }
}

// A peer that has given up this call, and said so, may have changed what it was still sending. What
// is small has left its memory by the time that its program can change it.
void MpiEngine::look_back(const BoundCall& call) {
  if (call.in_bytes + call.out_bytes < kLookBackBytes) return;
  const std::lock_guard lock(mutex_);
  look_for_notices(world_size_);
  if (failed_) raise_failure();
  if (must_conclude()) conclude();
}

// Runs a part of a train; if that fails, all that is under way is taken back.
template <typename F>
void MpiEngine::on_train(F&& part) {
  try {
    attempt([&] {
      if (trouble_ != nullptr) std::rethrow_exception(std::exchange(trouble_, nullptr));
      part();
    });
  } catch (...) {
    train_.clear();
    throw;
  }
}

void MpiEngine::start(const BoundCall& call, const void* in, void* out, uint32_t site,
                      double timeout_s) {
  check_usable();
  const Use use(user_, rank_);
  if (train_.empty()) settle();
  on_train([&] {
    // Packets go by the number of the call alone: there may be only one call that uses them.
    const auto passed = [&](const Car& car) {
      return car.over || (car.task->agreed() && !car.packets && !call.tiny);
    };
    if (!train_.empty()) {
      drive([&] { return std::all_of(train_.begin(), train_.end(), passed); });
    }
    add_to_train({&call, in, out, site, timeout_s, !train_.empty()}, true);
  });
}

void MpiEngine::enter(uint64_t descriptor, uint64_t count, uint32_t site) {
  const std::lock_guard lock(mutex_);
  in_call_ = true;
  waiting_ = {};
  last_descriptor_ = descriptor;
  last_count_ = count;
  last_check_ = 0;  // a part of the descriptor tells these calls apart
  last_site_ = site;
}

bool MpiEngine::nudge() {
  if (trouble_ != nullptr) return false;
  if (train_.empty()) {
    answer();
    return false;
  }
  try {
    const std::lock_guard lock(mutex_);
    advance_train();
  } catch (...) {
    trouble_ = std::current_exception();
  }
  return true;
}

// A rank that waits inside its host also tells those on other hosts, who report a failure, where it
// is. What has failed reaches it through its host.
void MpiEngine::answer() {
  const uint64_t now = coarse_ns();
  if (now < answered_ns_ + kAnswerNs) return;
  answered_ns_ = now;
  const std::lock_guard lock(mutex_);
  try {
    look_for_notices(kLooks);
    if (!someone_fails_ || failed_ || records_[rank_].kind != 0) return;
    records_[rank_] = own_record(Notice::kRecord);
    tell_all(records_[rank_]);
    flush(kGraceNs / 10);
  } catch (const Error&) {  // MPI does not answer, which those who wait for it will tell
  }
}

void MpiEngine::finish() {
  const Use use(user_, rank_);
  on_train([&] {
    drive([this] { return train_.front().over; });
    look_back(train_.front().task->call());
  });
  const std::lock_guard lock(mutex_);
  train_.pop_front();
  end();
  in_call_ = !train_.empty();
  deadline_ns_ = 0;
}

void MpiEngine::give_up() {
  const std::lock_guard lock(mutex_);
  train_.clear();
  trouble_ = nullptr;
}

std::unique_ptr<MpiTask> MpiEngine::make_task(const Job& job, uint64_t seq, uint32_t place) {
  return std::make_unique<MpiTask>(link_, *job.call, job.in, job.out, seq, job.proven,
                                   scratch_[place]);
}

}  // namespace pycoll
