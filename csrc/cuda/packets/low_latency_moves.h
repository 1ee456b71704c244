// Small plans that only copy, in packets. A rank sends its block, a block for each, or its vector
// to all others, and stores what it receives. See packets.h.
//
// Elements are bytes, whatever their type, and may lie anywhere.
#pragma once

#include "cuda/packets/packets.h"

namespace pycoll::cuda {

// What one block of one rank sends and receives in one call. A part is what one rank sends to one
// other; all have the same size.
template <typename P>
class MovePackets : public Packets<P> {
 public:
  PYCOLL_DEVICE MovePackets(Member<P>& member, uint64_t call) : Packets<P>(member, call) {
    const bool spread = a_.moves == Moves::kSpread;
    const uint64_t length = spread ? a_.shape.count : a_.shape.chunk;
    bytes_ = static_cast<uint32_t>(length * a_.shape.elem_bytes);
    in_step_ = a_.moves == Moves::kTranspose ? bytes_ : 0;
    out_step_ = spread ? 0 : bytes_;
    first_source_ = spread ? a_.root : 0;
    end_source_ = spread ? a_.root + 1 : n_;
    sends_ = !spread || rank_ == a_.root;
  }

  // Sends this block's packets to all peers, and stores what this rank has for itself.
  PYCOLL_DEVICE void send() const {
    if (!sends_) return;
    const char* const kept = in_ + rank_ * in_step_;
    char* const place = out_ + rank_ * out_step_;
    for (uint32_t i = first(); i * kPacketData < bytes_; i += stride()) {
      if (in_step_ != 0) {
        send_parts(i);
      } else {
        send_to_all(i);
      }
      if (out_ != nullptr && place != kept) write(place, i, read(kept, i));
    }
  }

  // Stores what comes for this block. False: this rank has to leave.
  PYCOLL_DEVICE bool receive() const {
    for (uint32_t i = first(); i * kPacketData < bytes_; i += stride()) {
      PYCOLL_ROLLED
      for (uint32_t begin = first_source_; begin < end_source_; begin += kGroup) {
        if (!receive_from(begin, i)) return false;
      }
    }
    return true;
  }

 private:
  using Packets<P>::m_, Packets<P>::a_, Packets<P>::p_, Packets<P>::n_, Packets<P>::rank_;
  using Packets<P>::buffer_, Packets<P>::in_, Packets<P>::out_;
  using Packets<P>::first, Packets<P>::stride, Packets<P>::slot, Packets<P>::packet_of;
  using Packets<P>::is_here, Packets<P>::data_of, Packets<P>::data_from;
  static constexpr uint32_t kGroup = 8;  // packets that are on their way to a thread at once

  // Packet i of a part; zeros behind its end.
  PYCOLL_DEVICE uint64_t read(const char* part, uint32_t i) const {
    const uint32_t at = i * kPacketData;
    const char* const from = part + at;
    const uint32_t left = bytes_ - at;
    const auto place = reinterpret_cast<uintptr_t>(from);
    if (left >= kPacketData && place % 8 == 0) return p_.template load<8>(from).w[0];
    if (left >= kPacketData && place % 4 == 0) {
      const uint64_t low = p_.template load<4>(from).w[0];
      return low | uint64_t{p_.template load<4>(from + 4).w[0]} << 32;
    }
    uint64_t data = 0;
    PYCOLL_UNROLL
    for (uint32_t j = 0; j < kPacketData; ++j) {
      if (j < left) data |= uint64_t{p_.template load<1>(from + j).w[0]} << 8 * j;
    }
    return data;
  }

  // Stores packet i of a part.
  PYCOLL_DEVICE void write(char* part, uint32_t i, uint64_t data) const {
    const uint32_t at = i * kPacketData;
    char* const to = part + at;
    const uint32_t left = bytes_ - at;
    const auto place = reinterpret_cast<uintptr_t>(to);
    if (left >= kPacketData && place % 8 == 0) return p_.store(to, Raw<8>{{data}});
    if (left >= kPacketData && place % 4 == 0) {
      p_.store(to, Raw<4>{{static_cast<uint32_t>(data)}});
      return p_.store(to + 4, Raw<4>{{static_cast<uint32_t>(data >> 32)}});
    }
    PYCOLL_UNROLL
    for (uint32_t j = 0; j < kPacketData; ++j) {
      if (j < left) p_.store(to + j, Raw<1>{{static_cast<uint8_t>(data >> 8 * j)}});
    }
  }

  PYCOLL_DEVICE void send_to_all(uint32_t i) const {
    const Packet packet = packet_of(read(in_, i));
    PYCOLL_UNROLL_4
    for (uint32_t q = 0; q < n_; ++q) {
      if (q != rank_) p_.store_packet(slot(buffer_, q, rank_) + i * kPacketBytes, packet);
    }
  }
  PYCOLL_DEVICE void send_parts(uint32_t i) const {
    PYCOLL_UNROLL_4
    for (uint32_t q = 0; q < n_; ++q) {
      if (q == rank_) continue;
      const Packet packet = packet_of(read(in_ + q * in_step_, i));
      p_.store_packet(slot(buffer_, q, rank_) + i * kPacketBytes, packet);
    }
  }

  // Packet i of some sources, from `begin` on, all on their way at once.
  PYCOLL_DEVICE bool receive_from(uint32_t begin, uint32_t i) const {
    const char* const base = slot(buffer_, rank_, begin);
    Packet packets[kGroup] = {};
    Awaited what = data_from(begin);
    const auto comes = [&](uint32_t k) { return begin + k < end_source_ && begin + k != rank_; };
    const auto there = [&] {
      PYCOLL_UNROLL
      for (uint32_t k = 0; k < kGroup; ++k) {
        if (comes(k)) packets[k] = p_.load_packet(base + k * a_.slot + i * kPacketBytes);
      }
      bool all = true;
      PYCOLL_UNROLL
      for (uint32_t k = 0; k < kGroup; ++k) {
        if (!comes(k) || is_here(packets[k])) continue;
        what.peer = begin + k;
        all = false;
      }
      return all;
    };
    if (!m_.poll(what, there)) return false;
    PYCOLL_UNROLL
    for (uint32_t k = 0; k < kGroup; ++k) {
      if (comes(k)) write(out_ + (begin + k) * out_step_, i, data_of(packets[k]));
    }
    return true;
  }

  uint32_t bytes_;               // of a part
  uint32_t in_step_, out_step_;  // from part to part; 0: there is one
  uint32_t first_source_, end_source_;
  bool sends_;
};

template <typename P>
PYCOLL_DEVICE void run_rank_moves(const P& p, const Launch& launch, uint32_t rank, uint32_t block) {
  run_rank_in_packets<MovePackets<P>>(p, launch, rank, block);
}

}  // namespace pycoll::cuda
