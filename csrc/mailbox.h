// Tagged messages between two ranks.
//
// Every ordered pair of ranks has a mailbox in the control segment: a ring of fragments, written by
// the sender only except for the count of fragments taken. A message is one or more fragments. A
// receiver that looks for another message stores what it finds on the way; so does a sender that
// waits for room, so two ranks that send to each other at the same time do not block one another.
//
// Cache lines that move per fragment: the ring's two counts, the fragment itself, the doorbell.
#pragma once

#include <memory>
#include <vector>

#include "engine.h"

namespace pycoll {

// One thread at a time (ConcurrentUseError otherwise), also beside another one that is in a call of
// the engine.
class Mailboxes {
 public:
  explicit Mailboxes(std::shared_ptr<Engine> engine);

  // Smallest useful size of a mailbox, in bytes.
  static constexpr uint64_t kMinBytes = 1024;

  // Sends nbytes to `dst`; returns when `data` may be changed. `type` travels with the message.
  // Throws CollTimeout (then the communicator is aborted, as half a message may have been sent) and
  // whatever Engine::check throws.
  void send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
            double timeout_s);

  // Receives the oldest message with this tag from `src`, or from any rank if src < 0, into `data`,
  // and returns its sender. Throws MismatchError if its size or type is another one (the message
  // stays), CollTimeout (nothing is lost), and whatever Engine::check throws; but what arrived
  // whole before its sender died or left is still received.
  uint32_t recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                double timeout_s);

 private:
  struct Ring;
  struct Fragment;
  struct Message {
    uint32_t src, tag, type;
    uint64_t nbytes;
    uint64_t received;
    std::unique_ptr<char[]> own;
    char* data;
  };
  struct Wanted {
    char* data;
    uint64_t nbytes;
    uint32_t type;
    int32_t src;
    uint32_t tag;
  };
  class Deadline;

  Ring& ring(uint32_t src, uint32_t dst) const;
  Fragment& fragment(Ring& ring, uint32_t index) const;
  bool drain(const Wanted* wanted);
  void take(uint32_t src, const Wanted* wanted);
  Message* find(const Wanted& wanted);
  void keep_copies();
  void knock(uint32_t rank);

  std::shared_ptr<Engine> engine_;
  ControlSegment& control_;
  uint32_t rank_, world_size_;
  uint32_t fragment_bytes_;  // data of one fragment
  User user_{0};
  WaitPolicy policy_;
  std::vector<Message> arrived_;  // in order of arrival, complete or not
};

}  // namespace pycoll
