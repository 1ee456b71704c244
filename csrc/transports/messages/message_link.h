// The messages of one communicator: small ones with a header (eager), and payload without (the
// second half of a rendezvous).
//
// All communicators of a job share one transport. A *context* number tells them apart: it is part
// of every tag, together with the *lane*. Eager messages go through buffers of the link, so they
// refer to nobody's arrays; whoever finds one of a call that is over drops it. Payload goes
// straight between arrays, once all ranks are known to be in the same call.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "base/fork_guard.h"
#include "base/wait.h"
#include "transports/messages/transport.h"
#include "transports/messages/wire.h"

namespace pycoll {

// Not thread-safe: one thread at a time, as the engine sees to.
class MessageLink {
 public:
  // `members`: rank in the transport of each rank of this communicator.
  MessageLink(std::shared_ptr<Transport> api, std::vector<int> members, uint32_t rank,
              uint32_t context);
  // Cancels what was posted and never matched.
  ~MessageLink();
  MessageLink(const MessageLink&) = delete;
  MessageLink& operator=(const MessageLink&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return static_cast<uint32_t>(members_.size()); }

  // Room for the data of an eager message, then send it. One at a time.
  char* open_eager();
  void send_eager(Lane lane, uint32_t peer, const EagerHeader& header);

  // The oldest eager message of a peer that has arrived and was not released, or null. Receives are
  // posted rank by rank: some MPIs let those from any source wait for ever where shared memory and
  // a network are both in use.
  const EagerHeader* receive_eager(Lane lane, uint32_t peer);
  // The data of one on Lane::kEager that has arrived and was not released.
  char* packet(uint32_t peer) {
    return slots(Lane::kEager)[peer].buffer.get() + sizeof(EagerHeader);
  }
  void release(Lane lane, uint32_t peer) { slots(lane)[peer].posted = false; }

  // Whether the eager messages of a call have left our buffers: then the call may end, and peers
  // get them even if this rank does not make progress for long. What else has been sent may wait
  // for its receiver: eager messages of a call that a rank has refused, messages of users, and
  // notices to a rank that makes no progress. A call must wait for none of these.
  bool flushed(uint64_t seq);
  // Whether all notices have left, and, if `mail`, all messages of users.
  bool notices_sent(bool mail);
  // Drops what has arrived of calls before this one, which somebody has refused. Until a rank takes
  // eager messages, their senders keep the buffers.
  void drop_before(uint64_t seq);

  void isend(const void* data, uint64_t nbytes, uint32_t peer, int lane, Request& request) {
    api_->isend(data, nbytes, members_[peer], tag(lane), request);
  }
  void irecv(void* data, uint64_t least, uint64_t most, uint32_t peer, int lane, Request& request) {
    api_->irecv(data, least, most, members_[peer], tag(lane), request);
  }
  bool test(Request& request) { return api_->test(request); }
  // Cancels receives. Those that a peer has begun to fill, and in a child made by fork all of them,
  // are left in `receives`: their memory must stay.
  void cancel_receives(std::vector<Request>& receives);

  // A notice to one rank. Sent in the background, see notices_sent().
  void send_notice(uint32_t peer, const Notice& notice);
  // Looks at so many ranks, another one first each time, and takes one notice that has arrived.
  // False if there is none. A look costs as much as a test.
  bool take_notice(Notice& notice, uint32_t looks);
  // Ends the connection to a rank that has sent what no rank sends. Throws TransportError.
  [[noreturn]] void reject(uint32_t peer, const std::string& why);

  // The rank whose connection was lost first, -1 if none was; not one of those that have
  // `departed`.
  int32_t first_lost(const std::vector<bool>& departed) const;
  Loss loss(uint32_t peer) const { return api_->loss(members_[peer]); }
  bool left(uint32_t peer) const { return api_->left(members_[peer]); }
  // A rank that the transport knows to be dead, or -1. Throws nothing.
  int32_t find_dead(const std::vector<bool>& departed);

 private:
  struct ReceiveSlot {  // one receive that is posted, or has completed
    std::unique_ptr<char[]> buffer;
    Request request = 0;
    bool posted = false, complete = false;
  };
  struct SendBuffer {
    std::unique_ptr<char[]> buffer;
    uint64_t capacity = 0;
    Request request = 0;
    Lane lane = Lane::kNotice;
    uint64_t seq = 0;  // of the call that an eager message belongs to
    bool busy = false;
  };
  int tag(int lane) const { return static_cast<int>(context_) * kLanes + lane; }
  int tag(Lane lane) const { return tag(static_cast<int>(lane)); }
  std::vector<ReceiveSlot>& slots(Lane lane) { return slots_[static_cast<size_t>(lane)]; }
  SendBuffer& free_buffer(uint64_t capacity, bool notice = false);
  bool sent(SendBuffer& buffer);
  template <typename F>
  bool all_sent(F&& matters);

  std::shared_ptr<Transport> api_;
  ForkGuard fork_guard_;
  std::vector<int> members_;
  uint32_t rank_, context_;
  // By lane and peer. That of notices has one slot: they are received after a probe.
  std::array<std::vector<ReceiveSlot>, 4> slots_;
  std::vector<SendBuffer> buffers_;
  size_t open_ = 0;    // of buffers_
  uint32_t next_ = 0;  // rank that was looked at last for a notice, and has sent one that is posted
};

}  // namespace pycoll
