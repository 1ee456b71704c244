// Fibers of one thread, and a scheduler that picks the next one at random, repeatably.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#include "host_policy.h"

namespace pycoll::cuda::host {

class Fibers : public Scheduler {
 public:
  explicit Fibers(uint64_t seed) : state_(seed * 2 + 1) {}

  void add(std::function<void()> body) {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers_.back();
    fiber.body = std::move(body);
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &home_;
    const auto address = reinterpret_cast<uintptr_t>(&fiber);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::start), 2,
                static_cast<unsigned>(address), static_cast<unsigned>(address >> 32));
  }

  // Runs all until they end; `ended` is called between switches after one has. False: all that are
  // left wait, and no clock can wake them.
  bool run(const std::function<void()>& ended) {
    while (!fibers_.empty()) {
      const size_t pick = random() % fibers_.size();
      current_ = fibers_[pick].get();
      swapcontext(&home_, &current_->context);
      ++turns;
      if (current_->done) {
        fibers_.erase(fibers_.begin() + static_cast<int64_t>(pick));
        idle_ = 0;
        ended();
      } else if (idle_ > kPatience * (fibers_.size() + 1)) {
        now_ns_ += 1'000'000'000;
        idle_ = 0;
        if (++jumps_ > kMostJumps) return false;
      }
    }
    return true;
  }

  // A lane that works goes on more often than not.
  void turn(Turn turn) override {
    if (turn == Turn::kWork) idle_ = 0;
    if (turn == Turn::kIdle) ++idle_;
    if (turn != Turn::kIdle && random() % 4 != 0) return;
    swapcontext(&current_->context, &home_);
  }
  uint64_t clock_ns() override { return now_ns_; }

  uint64_t turns = 0;

 private:
  static constexpr size_t kStackBytes = 64 << 10;
  static constexpr uint64_t kPatience = 60;  // idle turns of every fiber before the clock moves
  static constexpr uint64_t kMostJumps = 300;

  struct Fiber {
    std::function<void()> body;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    bool done = false;
  };

  static void start(unsigned low, unsigned high) {
    const uintptr_t address = static_cast<uintptr_t>(high) << 32 | low;
    Fiber& fiber = *reinterpret_cast<Fiber*>(address);
    fiber.body();
    fiber.done = true;
  }

  uint64_t random() {  // xorshift64*
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return (state_ * 0x2545F4914F6CDD1D) >> 33;
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* current_ = nullptr;
  ucontext_t home_;
  uint64_t state_, now_ns_ = 0, idle_ = 0, jumps_ = 0;
};

}  // namespace pycoll::cuda::host
