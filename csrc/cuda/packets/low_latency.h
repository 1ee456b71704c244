// Small plans of one fold in packets: every rank sends its input to all others, and folds what it
// receives, in the order of the plan. See packets.h.
#pragma once

#include "cuda/packets/packets.h"

namespace pycoll::cuda {

// What one block of one rank sends and receives in one call.
template <typename W, typename P>
class FoldPackets : public Packets<P> {
  using F = typename W::Fold;
  using Vals = typename F::template L<kPacketData>::Vals;

 public:
  PYCOLL_DEVICE FoldPackets(Member<P>& member, uint64_t call)
      : Packets<P>(member, call), parts_(a_.own_chunk != 0 && a_.push == 0) {}

  // Sends this block's packets to all peers.
  PYCOLL_DEVICE void send() const {
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

 private:
  using Packets<P>::m_, Packets<P>::a_, Packets<P>::p_, Packets<P>::n_, Packets<P>::rank_;
  using Packets<P>::buffer_, Packets<P>::in_, Packets<P>::out_;
  using Packets<P>::first, Packets<P>::stride, Packets<P>::slot, Packets<P>::packet_of;
  using Packets<P>::is_here, Packets<P>::data_of, Packets<P>::data_from;
  static constexpr uint32_t kGroup = 4;  // parts that are loaded at once

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

  const bool parts_;
};

template <typename W, typename P>
PYCOLL_DEVICE void run_rank_low_latency(const P& p, const Launch& launch, uint32_t rank,
                                        uint32_t block) {
  run_rank_in_packets<FoldPackets<W, P>>(p, launch, rank, block);
}

}  // namespace pycoll::cuda
