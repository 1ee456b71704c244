// How blocks of different ranks wait for each other: positions in flags, bounded waits, and the
// record of a rank that gives up. Protocol: docs/cuda.md.
#pragma once

#include "cuda/kernels/layout.h"

namespace pycoll::cuda {

// What a thread waits for, as its rank's record tells it.
struct Awaited {
  uint32_t peer, expected, seen, instruction;
};

// One block of one rank in one call.
template <typename P>
class Member {
 public:
  PYCOLL_DEVICE Member(const P& p, const Launch& launch, uint32_t rank, uint32_t block)
      : p_(p), a_(launch), rank_(rank), block_(block) {}

  PYCOLL_DEVICE const P& p() const { return p_; }
  PYCOLL_DEVICE const Launch& launch() const { return a_; }
  PYCOLL_DEVICE uint32_t rank() const { return rank_; }
  PYCOLL_DEVICE uint32_t block() const { return block_; }

  // Begins a call. False: the rank has to leave. Every rank has finished the call before, or the
  // launch itself is behind it, so cells and cards are free.
  PYCOLL_DEVICE bool enter() {
    Control& own = control(rank_);
    Shared& s = p_.shared();
    epoch_ = p_.load_relaxed(&own.epoch);
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      const bool known = !a_.exchange || q == rank_;
      const uint32_t entry = known ? q - a_.first_rank : 0;
      s.in[q] = known ? a_.in[entry] : nullptr;
      s.out[q] = known ? a_.out[entry] : nullptr;
      s.met[q] = known;
    }
    const bool failed = p_.tid() == 0 && p_.load_relaxed(&own.abort) != 0;
    if (failed) report(Fault::kFollowed, {rank_, 0, 0, kOutside});
    if (p_.any(failed)) return false;
    if (!a_.exchange) return true;
    bool fine = true;
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      if (q != rank_) fine &= await(&own.finished[q], position_of(epoch_, 0), q, kOutside);
    }
    return !p_.any(!fine);
  }

  // Begins segment s > 0: a peer that has entered the segment before has left the one before that,
  // whose cells this one uses again.
  PYCOLL_DEVICE bool next_segment() {
    const uint32_t before = epoch_++;
    bool fine = true;
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      if (q != rank_) fine &= await(flag_from(q), position_of(before, kEntered), q, kOutside);
    }
    ++segment_;
    return !p_.any(!fine);
  }

  // Publishes a step to all peers: what this block did before is visible to those that see it.
  // `written`: it has written something in this call that peers read, cards aside.
  PYCOLL_DEVICE void signal(uint32_t step, bool written = true) {
    p_.barrier();
    step_ = step;
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      if (q == rank_) continue;
      if (a_.exchange && segment_ == 0 && step == kEntered) {
        const uint32_t mine = rank_ - a_.first_rank;
        Card& card = cards(q)[block_ * a_.world_size + rank_];
        const auto heap = reinterpret_cast<uint64_t>(a_.heaps[rank_]);
        card.in = reinterpret_cast<uint64_t>(a_.in[mine]) - heap;
        card.out = reinterpret_cast<uint64_t>(a_.out[mine]) - heap;
        card.fingerprint = a_.fingerprint;
      }
      if (written || a_.exchange) {
        p_.store_release(flag_to(q, block_), position_of(epoch_, step), reach());
      } else {
        p_.store_relaxed(flag_to(q, block_), position_of(epoch_, step));
      }
    }
  }

  // By one thread: waits until the same block of a peer has published a step, and learns where the
  // peer's arrays are. False: give up.
  PYCOLL_DEVICE bool await_step(uint32_t peer, uint32_t step, uint32_t instruction) {
    if (!await(flag_from(peer), position_of(epoch_, step), peer, instruction)) return false;
    return learn_arrays(peer, instruction);
  }

  // By all threads: the same for all peers.
  PYCOLL_DEVICE bool await_all(uint32_t step, uint32_t instruction) {
    bool fine = true;
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      if (q != rank_) fine &= await_step(q, step, instruction);
    }
    return !p_.any(!fine);
  }

  // Ends a call. The last block of the rank makes the epoch that of the next call and tells peers
  // that the whole rank is done.
  PYCOLL_DEVICE void finish() {
    if (!await_entry_of_all()) return;
    Control& own = control(rank_);
    Shared& s = p_.shared();
    p_.barrier();
    if (a_.nblocks > 1) {  // one block alone needs no count, which takes half a microsecond
      if (p_.tid() == 0) s.last = p_.add(&own.done, 1, reach()) == a_.nblocks - 1;
      p_.barrier();
      if (!s.last) return;
    }
    const uint32_t next = epoch_ + 1, first = epoch_ - segment_;
    if (p_.tid() == 0) {
      p_.store_relaxed(&own.done, 0);
      p_.store_relaxed(&own.epoch, next & 0xFFFF);
    }
    const bool renew = first / kRenewEvery != next / kRenewEvery;
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      if (q == rank_) continue;
      for (uint32_t b = 0; renew && b < a_.max_blocks; ++b) {
        p_.store_release(flag_to(q, b), position_of(next, 0), reach());
      }
      if (a_.exchange) p_.store_release(&control(q).finished[rank_], position_of(next, 0));
    }
  }

  // Number of the running segment.
  PYCOLL_DEVICE uint32_t segment() const { return segment_; }

  // Position of this rank in the plan, for records.
  PYCOLL_DEVICE uint32_t position(uint32_t step) const { return position_of(epoch_, step); }

  // Begins a low-latency call, which waits for nothing here and leaves the epoch as it is. Returns
  // how many there were before; `aborted`: the rank has to leave.
  PYCOLL_DEVICE uint64_t begin_packets(bool& aborted) {
    const Control& own = control(rank_);
    const uint64_t calls = p_.load_relaxed(&own.packet_calls);
    aborted = p_.load_relaxed(&own.abort) != 0;
    epoch_ = p_.load_relaxed(&own.epoch);
    step_ = kEntered;
    return calls / kMaxBlocks;
  }

  // By one thread, when all threads of the block know the number of the call.
  PYCOLL_DEVICE void count_packets() const {
    const uint32_t share = kMaxBlocks / a_.nblocks, rest = kMaxBlocks % a_.nblocks;
    p_.count(&control(rank_).packet_calls, share + (block_ == 0 ? rest : 0));
  }

  // Writes the record if no other block of this rank has.
  PYCOLL_DEVICE void report(Fault fault, const Awaited& what, uint64_t waited_ns = 0) {
    if (!p_.claim(&control(rank_).claimed)) return;
    Record& record = *a_.records[rank_ - a_.first_rank];
    record.rank = rank_;
    record.peer = what.peer;
    record.block = block_;
    record.step = step_;
    record.expected = what.expected;
    record.seen = what.seen;
    record.instruction = what.instruction;
    record.waited_ns = waited_ns;
    p_.store_release(&record.kind, static_cast<uint32_t>(fault));
  }

  // The same, and makes all ranks leave.
  PYCOLL_DEVICE void give_up(Fault fault, const Awaited& what, uint64_t waited_ns = 0) {
    report(fault, what, waited_ns);
    PYCOLL_ROLLED
    for (uint32_t q = 0; q < a_.world_size; ++q) p_.store_release(&control(q).abort, 1);
  }

  // By one thread: looks until `there()` finds what it waits for; `what` tells what it saw last.
  // False: timed out, or somebody has given up.
  template <typename There>
  PYCOLL_DEVICE bool poll(const Awaited& what, There there) {
    uint64_t begin = 0, look_at_host = 0;
    PYCOLL_ROLLED
    for (uint32_t spins = 0;; ++spins) {
      uint32_t abort = 0;
      if (spins != 0) {
        p_.backoff(spins);
        abort = p_.load_relaxed(&control(rank_).abort);  // on its way together with what follows
      }
      if (there()) return true;
      if (spins == 0) {
        begin = p_.clock_ns();
        look_at_host = begin + kHostEveryNs;
      }
      if (abort != 0) {
        report(Fault::kFollowed, what, p_.clock_ns() - begin);
        return false;
      }
      if (spins % kCheckEvery != kCheckEvery - 1) continue;
      const uint64_t now = p_.clock_ns(), waited = now - begin;
      bool aborted = false;
      if (now >= look_at_host) {
        look_at_host = now + kHostEveryNs;
        aborted = p_.load_relaxed(&a_.records[rank_ - a_.first_rank]->abort) != 0;
      }
      if (!aborted && waited <= a_.timeout_ns) continue;
      give_up(aborted ? Fault::kAborted : Fault::kTimeout, what, waited);
      return false;
    }
  }

 private:
  // How far a release to peers has to reach. What the host reads too is released to the system.
  PYCOLL_DEVICE Reach reach() const { return a_.exchange ? Reach::kSystem : Reach::kDevice; }

  PYCOLL_DEVICE Control& control(uint32_t rank) const {
    return *reinterpret_cast<Control*>(a_.control[rank]);
  }
  // Where this rank tells `peer` the position of one of its blocks.
  PYCOLL_DEVICE uint32_t* flag_to(uint32_t peer, uint32_t block) const {
    return reinterpret_cast<uint32_t*>(a_.control[peer] + flags_offset()) +
           (block * a_.world_size + rank_);
  }
  // Where `peer` tells this rank the position of this block.
  PYCOLL_DEVICE const uint32_t* flag_from(uint32_t peer) const {
    return reinterpret_cast<uint32_t*>(a_.control[rank_] + flags_offset()) +
           (block_ * a_.world_size + peer);
  }
  PYCOLL_DEVICE Card* cards(uint32_t rank) const {
    return reinterpret_cast<Card*>(a_.control[rank] + cards_offset(a_.world_size, a_.max_blocks));
  }

  // By one thread that has seen the peer enter.
  PYCOLL_DEVICE bool learn_arrays(uint32_t peer, uint32_t instruction) {
    Shared& s = p_.shared();
    if (s.met[peer]) return true;
    const Card& card = cards(rank_)[block_ * a_.world_size + peer];
    if (card.fingerprint != a_.fingerprint) {
      give_up(Fault::kMismatch, {peer, a_.fingerprint, card.fingerprint, instruction});
      return false;
    }
    const auto heap = reinterpret_cast<uint64_t>(a_.heaps[peer]);
    s.in[peer] = reinterpret_cast<char*>(heap + card.in);
    s.out[peer] = reinterpret_cast<char*>(heap + card.out);
    s.met[peer] = true;
    return true;
  }

  // Nobody leaves a call before every rank has entered it with the same arguments, even where its
  // plan needs nothing of that rank.
  PYCOLL_DEVICE bool await_entry_of_all() {
    if (!a_.exchange) return true;
    bool fine = true;
    const uint32_t entered = position_of(epoch_ - segment_, kEntered);
    for (uint32_t q = p_.tid(); q < a_.world_size; q += p_.threads()) {
      if (p_.shared().met[q]) continue;
      fine &= await(flag_from(q), entered, q, kOutside) && learn_arrays(q, kOutside);
    }
    return !p_.any(!fine);
  }

  // By one thread. False: timed out, or somebody has given up.
  PYCOLL_DEVICE bool await(const uint32_t* word, uint32_t wanted, uint32_t peer,
                           uint32_t instruction) {
    Awaited what{peer, wanted, 0, instruction};
    return poll(what, [&] {
      what.seen = p_.load_acquire(word);
      return reached(what.seen, wanted);
    });
  }

  static constexpr uint32_t kCheckEvery = 32;  // spins
  // Between two looks at the host's abort word. A read goes over the bus, and when hundreds of
  // waiting threads read at every turn, those that still work are slowed down too: two shots over
  // 64 MiB on an H100 took 15 to 20 % longer, with two blocks on a multiprocessor up to twice as
  // long.
  static constexpr uint64_t kHostEveryNs = 1'000'000;

  const P& p_;
  const Launch& a_;
  uint32_t rank_, block_;
  uint32_t epoch_ = 0;  // of the running segment; may run past 2^16, positions wrap
  uint32_t segment_ = 0;
  uint32_t step_ = 0;  // newest published
};

}  // namespace pycoll::cuda
