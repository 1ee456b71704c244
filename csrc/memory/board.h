// What a rank shows of itself where ranks share no control segment: memory of its own, that nobody
// else writes and no peer reads. Those who look find it by its descriptor in /proc.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "memory/control.h"

namespace pycoll {

// The connection to one peer, as the system counts it. `seen_ns` is stored last.
struct alignas(64) Link {
  std::atomic<uint64_t> seen_ns;  // when that was so, by CLOCK_MONOTONIC; 0: nothing is known
  std::atomic<uint64_t> sent, received;  // bytes; sent are those that the peer's system has
  std::atomic<uint64_t> unacked;  // bytes that this rank has sent, and the peer's system has not
  std::atomic<uint64_t> busy_us;  // time in which there were any
  std::atomic<uint32_t> rtt_us;
  std::atomic<uint32_t> retransmits;
  std::atomic<uint32_t> ack_age_ms;  // since the peer's system has answered
  std::atomic<uint32_t> retries;     // of the oldest bytes without an answer, in a row
};

class Board {
 public:
  // Null if the system has no memory, or no descriptor, left: then nobody can look. `cookie` is
  // alike on all ranks of a communicator; 0: of the connections of a rank, which are `links`.
  static std::unique_ptr<Board> make(uint64_t cookie, uint32_t world_size, uint32_t rank,
                                     uint32_t links);
  // Maps that of another process for reading only. Throws TransportError if there is none, or one
  // of another version.
  static std::unique_ptr<const Board> view(int fd);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  uint64_t cookie() const;
  uint32_t world_size() const;
  uint32_t rank() const;
  uint32_t links() const;
  // Cookie of the control segment in which this communicator runs the stages inside its host, or 0.
  uint64_t inside() const;
  void set_inside(uint64_t cookie);
  RankBlock& block() { return *block_; }
  const RankBlock& block() const { return *block_; }
  Link& link(uint32_t peer) { return links_[peer]; }
  const Link& link(uint32_t peer) const { return links_[peer]; }

  // The rank begins a call, waits in it for a step of a peer, ends it.
  void begin_call(uint64_t iteration, uint64_t descriptor, uint64_t count, uint32_t site);
  void waits(int32_t peer, uint32_t step, uint64_t since_ns);
  void end_call(bool done);
  void name_site(uint32_t id, std::string_view text);
  // It leaves, with a reason, or closes.
  void leave(Phase phase, std::string_view text = {});

 private:
  Board() = default;
  void map(int fd, uint64_t bytes, bool writable);

  int fd_ = -1;
  char* base_ = nullptr;
  uint64_t bytes_ = 0;
  RankBlock* block_ = nullptr;
  Link* links_ = nullptr;
};

// Shows others whom a rank waits for in send or recv, once that takes long; of several threads that
// wait, one.
class MessageNote {
 public:
  explicit MessageNote(RankBlock* block) : block_(block) {}
  ~MessageNote() {
    if (shown_) block_->message_way.store(uint32_t(MessageWay::kNone), std::memory_order_release);
  }
  MessageNote(const MessageNote&) = delete;
  MessageNote& operator=(const MessageNote&) = delete;

  void waits(MessageWay way, int32_t peer, uint32_t tag);

 private:
  RankBlock* block_;  // null: nobody looks
  bool shown_ = false;
};

}  // namespace pycoll
