// Small calls in one hop: a rank sends its input to others in packets that say themselves that they
// have come, and folds or stores what it receives; see low_latency.h and low_latency_moves.h. There
// is no fence, and no rank waits for another one but for its data.
//
// A packet is 16 bytes: 8 of data, and in each half of 8 bytes the flag of the call. A half is
// stored and loaded at once, so a half with the flag has the data, whatever the other half has.
//
// The flag is the number of the call among those of this kind, plus 1, modulo 2^32, so nothing is
// cleared between calls. A buffer has a slot for the packets of each rank. There are two buffers,
// used by turns, and two are enough: a rank begins call c + 2 after it has finished call c + 1, for
// which it had a packet of every peer, and a peer sends that when its own launch of call c is over.
// Calls of other kernels in between touch no packets. Among virtual ranks one launch is all of
// them. Peers are sure to send each other a packet, even of no data: the header.
//
// Packets that a call does not write keep old flags. Long before 2^32 calls could make one look
// new, every rank writes all of its slots once.
#pragma once

#include "cuda/kernels/signals.h"

namespace pycoll::cuda {

// Where one block of one rank finds packets in one call, and what all kinds of calls do with them.
template <typename P>
class Packets {
 public:
  PYCOLL_DEVICE Packets(Member<P>& member, uint64_t call)
      : m_(member),
        a_(member.launch()),
        p_(member.p()),
        n_(a_.world_size),
        rank_(member.rank()),
        flag_(static_cast<uint32_t>(call + 1)),
        buffer_(call & 1),
        in_(a_.in[rank_ - a_.first_rank]),
        out_(a_.out[rank_ - a_.first_rank]) {}

  // Tells all peers that this rank has begun the call.
  PYCOLL_DEVICE void send_headers() const {
    if (!a_.exchange || m_.block() != 0) return;
    for (uint32_t q = p_.tid(); q < n_; q += p_.threads()) {
      if (q != rank_) p_.store_packet(header(q, rank_), packet_of(a_.fingerprint));
    }
  }

  // Waits until all peers have begun this call, the same one. False: this rank has to leave.
  PYCOLL_DEVICE bool meet() const {
    if (!a_.exchange || m_.block() != 0) return true;
    for (uint32_t q = p_.tid(); q < n_; q += p_.threads()) {
      if (q == rank_) continue;
      Packet packet;
      const auto there = [&] { return is_here(packet = p_.load_packet(header(rank_, q))); };
      if (!m_.poll(data_from(q), there)) return false;
      const auto seen = static_cast<uint32_t>(data_of(packet));
      if (seen == a_.fingerprint) continue;
      m_.give_up(Fault::kMismatch, {q, a_.fingerprint, seen, kFirstWait});
      return false;
    }
    return true;
  }

  // By one block that has met all peers: gives the packets of the other buffer, which they have
  // left, a flag that this buffer alone uses.
  PYCOLL_DEVICE void renew() const {
    for (uint32_t q = 0; q < n_; ++q) {
      char* const there = slot(buffer_ ^ 1, q, rank_);
      for (uint64_t at = p_.tid() * kPacketBytes; q != rank_ && at < a_.slot;
           at += p_.threads() * kPacketBytes) {
        p_.store_packet(there + at, packet_of(0));
      }
    }
  }

 protected:
  static constexpr uint32_t kFirstWait = 1;  // instruction of the plan

  // Packets of this thread.
  PYCOLL_DEVICE uint32_t first() const { return m_.block() * p_.threads() + p_.tid(); }
  PYCOLL_DEVICE uint32_t stride() const { return a_.nblocks * p_.threads(); }

  // Where `source` writes packets in the memory of a rank.
  PYCOLL_DEVICE char* slot(uint32_t buffer, uint32_t rank, uint32_t source) const {
    return a_.control[rank] + a_.packets + (buffer * n_ + source) * a_.slot;
  }
  PYCOLL_DEVICE char* header(uint32_t rank, uint32_t source) const {
    return a_.control[rank] + a_.packets + 2 * n_ * a_.slot +
           (buffer_ * n_ + source) * kPacketBytes;
  }

  PYCOLL_DEVICE Packet packet_of(uint64_t data) const {
    const uint64_t flag = uint64_t{flag_} << 32;
    return {{flag | (data & 0xFFFFFFFF), flag | data >> 32}};
  }
  PYCOLL_DEVICE bool is_here(const Packet& packet) const {
    return packet.half[0] >> 32 == flag_ && packet.half[1] >> 32 == flag_;
  }
  static PYCOLL_DEVICE uint64_t data_of(const Packet& packet) {
    return (packet.half[0] & 0xFFFFFFFF) | packet.half[1] << 32;
  }

  // A peer's data comes with its "entered".
  PYCOLL_DEVICE Awaited data_from(uint32_t q) const {
    return {q, m_.position(kEntered), m_.position(0), kFirstWait};
  }

  Member<P>& m_;
  const Launch& a_;
  const P& p_;
  const uint32_t n_, rank_;
  const uint32_t flag_, buffer_;
  const char* const in_;
  char* const out_;
};

// One block of one rank: `Kind` sends and receives. The loads of number, abort word and input are
// on their way together.
template <typename Kind, typename P>
PYCOLL_DEVICE void run_rank_in_packets(const P& p, const Launch& launch, uint32_t rank,
                                       uint32_t block) {
  if (launch.absent >> rank & 1) return;
  Member<P> m(p, launch, rank, block);
  bool aborted;
  const uint64_t call = m.begin_packets(aborted);
  const Kind packets(m, call);
  packets.send_headers();
  packets.send();
  p.barrier();
  if (p.tid() == 0) {
    m.count_packets();
    if (aborted) m.report(Fault::kFollowed, {rank, 0, 0, kOutside});
  }
  const bool fine = !aborted && packets.meet() && packets.receive();
  if (block != 0 || call % kRenewPackets < kRenewPackets - 2) return;
  if (!p.any(!fine)) packets.renew();
}

}  // namespace pycoll::cuda
