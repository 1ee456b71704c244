// Small plans of one fold in one hop: every rank sends its input to all others in packets that say
// themselves that they have come, and folds what it receives, in the order of the plan. There is
// no fence, and no rank waits for another one but for its data.
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

// What one block of one rank sends and receives in one call.
template <typename W, typename P>
class Packets {
  using F = typename W::Fold;
  using Vals = typename F::template L<kPacketData>::Vals;

 public:
  PYCOLL_DEVICE Packets(Member<P>& member, uint64_t call)
      : m_(member),
        a_(member.launch()),
        p_(member.p()),
        n_(a_.world_size),
        rank_(member.rank()),
        flag_(static_cast<uint32_t>(call + 1)),
        buffer_(call & 1),
        parts_(a_.own_chunk != 0 && a_.push == 0),
        in_(a_.in[rank_ - a_.first_rank]),
        out_(a_.out[rank_ - a_.first_rank]) {}

  // Sends this block's packets to all peers.
  PYCOLL_DEVICE void send() const {
    if (a_.exchange && m_.block() == 0) {
      for (uint32_t q = p_.tid(); q < n_; q += p_.threads()) {
        if (q != rank_) p_.store_packet(header(q, rank_), packet_of(a_.fingerprint));
      }
    }
    for (uint32_t i = first(); i * kPacketData < bytes_of(0); i += stride()) {
      if (parts_) {
        send_parts(i);
        continue;
      }
      const Packet packet = packet_of(read(rank_, i));
      PYCOLL_UNROLL_4
      for (uint32_t q = 0; q < n_; ++q) {
        if (q != rank_) p_.store_packet(slot(buffer_, q, rank_) + i * kPacketBytes, packet);
      }
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

  // Folds what comes for this block. False: this rank has to leave.
  PYCOLL_DEVICE bool receive() const {
    switch (n_) {
      case 2:
        return receive_from<2, false>();
      case 4:
        return a_.tree ? receive_from<4, true>() : receive_from<4, false>();
      case 8:
        return a_.tree ? receive_from<8, true>() : receive_from<8, false>();
      default:
        return receive_from_any();
    }
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

 private:
  static constexpr uint32_t kFirstWait = 1;  // instruction of the plan
  static constexpr uint32_t kGroup = 4;      // parts that are loaded at once

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

  // What rank q folds of this rank's input: all, or a chunk. Chunk 0 is the longest.
  PYCOLL_DEVICE uint64_t start_of(uint32_t q) const {
    return parts_ ? q * a_.shape.chunk * a_.shape.elem_bytes : 0;
  }
  PYCOLL_DEVICE uint32_t bytes_of(uint32_t q) const {
    uint64_t length = a_.shape.count;
    if (parts_) {
      const uint64_t start = q * a_.shape.chunk;
      length = start < length ? length - start : 0;
      if (length > a_.shape.chunk) length = a_.shape.chunk;
    }
    return static_cast<uint32_t>(length * a_.shape.elem_bytes);
  }

  // Packet i of what rank q folds; zeros behind its end.
  PYCOLL_DEVICE uint64_t read(uint32_t q, uint32_t i) const {
    const uint32_t at = i * kPacketData, end = bytes_of(q);
    const char* const from = in_ + start_of(q) + at;
    if (at + kPacketData <= end && is_aligned(from)) {
      return p_.template load<kPacketData>(from).w[0];
    }
    uint64_t data = 0;
    if constexpr (W::kSize < kPacketData) {
      PYCOLL_UNROLL
      for (uint32_t j = 0; j < kPacketData; j += W::kSize) {
        if (at + j < end) data |= uint64_t{p_.template load<W::kSize>(from + j).w[0]} << 8 * j;
      }
    }
    return data;
  }

  // Stores packet i of the result.
  PYCOLL_DEVICE void write(uint32_t i, Vals acc) const {
    const auto raw =
        F::template result<kPacketData>(p_, {a_.shape.scale_n, a_.shape.is_signed != 0}, acc);
    const uint32_t at = i * kPacketData, end = bytes_of(rank_);
    char* const to = out_ + at;
    if (at + kPacketData <= end && is_aligned(to)) return p_.store(to, raw);
    if constexpr (W::kSize < kPacketData) {
      using Element = Raw<W::kSize>;
      const auto elements = __builtin_bit_cast(Values<Element, kPacketData / W::kSize>, raw);
      PYCOLL_UNROLL
      for (uint32_t j = 0; j < kPacketData; j += W::kSize) {
        if (at + j < end) p_.store(to + j, elements.v[j / W::kSize]);
      }
    }
  }
  static PYCOLL_DEVICE bool is_aligned(const char* p) {
    return W::kSize == kPacketData || reinterpret_cast<uintptr_t>(p) % kPacketData == 0;
  }

  // Packet i of every peer's part.
  PYCOLL_DEVICE void send_parts(uint32_t i) const {
    PYCOLL_ROLLED
    for (uint32_t begin = 0; begin < n_; begin += kGroup) {
      uint64_t data[kGroup] = {};
      const auto goes = [&](uint32_t q) {
        return q < n_ && q != rank_ && i * kPacketData < bytes_of(q);
      };
      PYCOLL_UNROLL
      for (uint32_t k = 0; k < kGroup; ++k) {
        if (goes(begin + k)) data[k] = read(begin + k, i);
      }
      PYCOLL_UNROLL
      for (uint32_t k = 0; k < kGroup; ++k) {
        if (!goes(begin + k)) continue;
        p_.store_packet(slot(buffer_, begin + k, rank_) + i * kPacketBytes, packet_of(data[k]));
      }
    }
  }

  // A peer's data comes with its "entered".
  PYCOLL_DEVICE Awaited data_from(uint32_t q) const {
    return {q, m_.position(kEntered), m_.position(0), kFirstWait};
  }

  // Each packet from all ranks of a number that is known to the compiler: all on their way at once.
  template <int kN, bool kTree>
  PYCOLL_DEVICE bool receive_from() const {
    const char* const base = slot(buffer_, rank_, 0);
    const uint32_t end = bytes_of(rank_);
    PYCOLL_ROLLED
    for (uint32_t i = first(); i * kPacketData < end; i += stride()) {
      const uint64_t own = read(rank_, i);
      Packet packets[kN] = {};
      Awaited what = data_from(0);
      const auto there = [&] {
        PYCOLL_UNROLL
        for (uint32_t q = 0; q < kN; ++q) {
          if (q != rank_) packets[q] = p_.load_packet(base + q * a_.slot + i * kPacketBytes);
        }
        bool all = true;
        PYCOLL_UNROLL
        for (uint32_t q = 0; q < kN; ++q) {
          if (q == rank_ || is_here(packets[q])) continue;
          what.peer = q;
          all = false;
        }
        return all;
      };
      if (!m_.poll(what, there)) return false;
      Raw<kPacketData> raw[kN];
      PYCOLL_UNROLL
      for (uint32_t q = 0; q < kN; ++q) raw[q] = {{q == rank_ ? own : data_of(packets[q])}};
      write(i, F::template join<0, kN, kTree>(p_, raw));
    }
    return true;
  }

  // The same for any number of ranks: all are there before any is folded.
  PYCOLL_DEVICE bool receive_from_any() const {
    const char* const base = slot(buffer_, rank_, 0);
    const uint32_t end = bytes_of(rank_);
    PYCOLL_ROLLED
    for (uint32_t i = first(); i * kPacketData < end; i += stride()) {
      const auto load = [&](uint32_t q) {
        return p_.load_packet(base + q * a_.slot + i * kPacketBytes);
      };
      Awaited what = data_from(0);
      const auto there = [&] {
        bool all = true;
        PYCOLL_UNROLL_4
        for (uint32_t q = 0; q < n_; ++q) {
          if (q == rank_ || is_here(load(q))) continue;
          what.peer = q;
          all = false;
        }
        return all;
      };
      if (!m_.poll(what, there)) return false;
      const auto from = [&](uint32_t q) {
        const Raw<kPacketData> raw{{q == rank_ ? read(rank_, i) : data_of(load(q))}};
        return F::template L<kPacketData>::decode(p_, raw);
      };
      const bool in_tree = F::kRounds && a_.tree && n_ > 3;
      write(i, in_tree ? F::template tree<kPacketData>(n_, from)
                       : F::template serial<kPacketData>(n_, from));
    }
    return true;
  }

  Member<P>& m_;
  const Launch& a_;
  const P& p_;
  const uint32_t n_, rank_;
  const uint32_t flag_, buffer_;
  const bool parts_;
  const char* const in_;
  char* const out_;
};

// One block of one rank. The loads of number, abort word and input are on their way together.
template <typename W, typename P>
PYCOLL_DEVICE void run_rank_low_latency(const P& p, const Launch& launch, uint32_t rank,
                                        uint32_t block) {
  if (launch.absent >> rank & 1) return;
  Member<P> m(p, launch, rank, block);
  bool aborted;
  const uint64_t call = m.begin_packets(aborted);
  const Packets<W, P> packets(m, call);
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
