// Plans written by hand, one for each way of using the engine.
#pragma once

#include "engine/engine.h"

namespace plans {

using namespace pycoll;

// Appends instructions; the text of a plan then reads like the algorithm.
class Builder {
 public:
  Builder(uint32_t n, uint32_t rank, uint32_t chunks, uint32_t slots, bool direct = false)
      : plan_(std::make_shared<Plan>()) {
    plan_->world_size = n;
    plan_->rank = rank;
    plan_->chunks = chunks;
    plan_->slots = slots;
    plan_->direct = direct;
  }
  Builder& fold(const std::vector<Operand>& srcs, const std::vector<Operand>& dsts,
                uint32_t count = 1, uint8_t flags = 0) {
    Instr instr{};
    instr.op = uint8_t(Opcode::kFold);
    instr.flags = flags;
    instr.nsrc = uint16_t(srcs.size());
    instr.ndst = uint16_t(dsts.size());
    instr.arg = uint32_t(plan_->operands.size());
    instr.count = count;
    plan_->operands.insert(plan_->operands.end(), srcs.begin(), srcs.end());
    plan_->operands.insert(plan_->operands.end(), dsts.begin(), dsts.end());
    plan_->code.push_back(instr);
    return *this;
  }
  Builder& signal(uint32_t step) { return add(Opcode::kSignal, 0, step); }
  Builder& wait(uint32_t peer, uint32_t step) { return add(Opcode::kWait, peer, step); }
  Builder& wait_all(uint32_t step) {
    for (uint32_t q = 0; q < plan_->world_size; ++q) {
      if (q != plan_->rank) wait(q, step);
    }
    return *this;
  }
  std::shared_ptr<const Plan> done() {
    plan_->check();
    return plan_;
  }

 private:
  Builder& add(Opcode op, uint32_t peer, uint32_t arg) {
    Instr instr{};
    instr.op = uint8_t(op);
    instr.peer = uint16_t(peer);
    instr.arg = arg;
    plan_->code.push_back(instr);
    return *this;
  }
  std::shared_ptr<Plan> plan_;
};

inline Operand in(uint32_t rank, uint32_t chunk) { return {uint16_t(rank), 0, chunk}; }
inline Operand out(uint32_t rank, uint32_t chunk) { return {uint16_t(rank), 1, chunk}; }
inline Operand cell(uint32_t rank, uint32_t slot) { return {uint16_t(rank), 2, slot}; }

inline std::vector<Operand> of_all(uint32_t n, Operand (*piece)(uint32_t, uint32_t), uint32_t i) {
  std::vector<Operand> all;
  for (uint32_t q = 0; q < n; ++q) all.push_back(piece(q, i));
  return all;
}

// Everybody reads everybody's whole vector from the cells.
inline std::shared_ptr<const Plan> one_shot(uint32_t n, uint32_t r, uint8_t flags = kFoldComplete) {
  return Builder(n, r, 1, 1)
      .fold({in(r, 0)}, {cell(r, 0)})
      .signal(kEntered)
      .wait_all(kEntered)
      .fold(of_all(n, cell, 0), {out(r, 0)}, 1, flags)
      .done();
}

// Rank r folds chunk r of everybody's array and stores it in everybody's array.
inline std::shared_ptr<const Plan> two_shot_direct(uint32_t n, uint32_t r) {
  return Builder(n, r, n, 0, true)
      .signal(kEntered)
      .wait_all(kEntered)
      .fold(of_all(n, in, r), of_all(n, out, r), 1, kFoldComplete)
      .signal(2)
      .wait_all(2)
      .done();
}

// A pulling ring with a signal per line: slots c hold partial sums, slots n + c final ones.
inline std::shared_ptr<const Plan> ring(uint32_t n, uint32_t r) {
  Builder plan(n, r, n, 2 * n);
  const uint32_t left = (r + n - 1) % n;
  plan.fold({in(r, 0)}, {cell(r, 0)}, n).signal(kEntered);
  if (n == 1) plan.fold({in(r, 0)}, {cell(r, 1)});
  for (uint32_t s = 0; s + 1 < n; ++s) {
    const uint32_t c = (r + 2 * n - 1 - s) % n;
    plan.wait(left, 1 + s);
    plan.fold({cell(left, c), in(r, c)}, {cell(r, s + 2 == n ? n + c : c)}).signal(2 + s);
  }
  for (uint32_t t = 0; t + 1 < n; ++t) {
    const uint32_t c = (r + n - t) % n;
    plan.wait(left, n + t).fold({cell(left, n + c)}, {cell(r, n + c)}).signal(n + 1 + t);
  }
  return plan.fold({cell(r, n)}, {out(r, 0)}, n).done();
}

// The root puts its vector in its own cell (pull) or in everybody's (push) and waits for nobody:
// only the gate holds it back.
inline std::shared_ptr<const Plan> from_root(uint32_t n, uint32_t r, uint32_t root, bool push) {
  Builder plan(n, r, 1, 1);
  if (r == root) {
    plan.fold({in(r, 0)}, push ? of_all(n, cell, 0) : std::vector{cell(r, 0)}).signal(2);
    return plan.fold({in(r, 0)}, {out(r, 0)}).done();
  }
  return plan.wait(root, 2).fold({cell(push ? r : root, 0)}, {out(r, 0)}).done();
}

// IN is the whole vector; OUT holds only the chunk of the rank (Layout::kOwn).
inline std::shared_ptr<const Plan> scatter_sum(uint32_t n, uint32_t r) {
  return Builder(n, r, n, n)
      .fold({in(r, 0)}, {cell(r, 0)}, n)
      .signal(kEntered)
      .wait_all(kEntered)
      .fold(of_all(n, cell, r), {out(r, r)}, 1, kFoldTree)
      .done();
}

// IN holds only the chunk of the rank; OUT is the whole vector.
inline std::shared_ptr<const Plan> collect(uint32_t n, uint32_t r) {
  Builder plan(n, r, n, 1);
  plan.fold({in(r, r)}, {cell(r, 0)}).signal(kEntered).wait_all(kEntered);
  for (uint32_t q = 0; q < n; ++q) plan.fold({cell(q, 0)}, {out(r, q)});
  return plan.done();
}

// The same on the users' arrays: everybody pushes its chunk.
inline std::shared_ptr<const Plan> collect_direct(uint32_t n, uint32_t r) {
  return Builder(n, r, n, 0, true)
      .signal(kEntered)
      .wait_all(kEntered)
      .fold({in(r, r)}, of_all(n, out, r))
      .signal(2)
      .wait_all(2)
      .done();
}

}  // namespace plans
