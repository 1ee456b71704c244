// One call over messages, as a machine that never waits.
//
// Small messages go in packets, each with the call's descriptor in its header (PacketTask). A call
// with larger ones is a rendezvous (PayloadTask): a dissemination among all ranks makes sure that
// they are all in the same call; then payload moves. So nothing reaches a user's array, and nothing
// refers to one, before all ranks agree. Calls in which a rank does not depend on all others (those
// with a root) agree in any case.
#pragma once

#include "engine/bind.h"
#include "transports/messages/message_link.h"

namespace pycoll {

// What a task waits for, for reports.
struct Waiting {
  int32_t peer = -1;
  uint32_t step = 0;  // kEntered: to make the call; else round + 2
};

// Thrown if a packet of this call has another descriptor or count.
struct Disagreement {
  uint32_t peer;
  EagerHeader header;
};

class MessageTask {
 public:
  // Which call it is. The parity of `seq` tells the payload of two calls in flight apart, so a link
  // has at most kBatch tasks. `check` is what headers have. `proven`: all ranks are known to make
  // this call, or it is left before they are.
  struct Turn {
    uint64_t seq;
    uint32_t check;
    bool proven;
  };
  // `in` and `out` hold at least call.in_bytes and call.out_bytes.
  MessageTask(MessageLink& link, const BoundCall& call, const void* in, void* out, Turn turn);
  // Cancels what is under way, after a failure.
  virtual ~MessageTask() = default;
  MessageTask(const MessageTask&) = delete;
  MessageTask& operator=(const MessageTask&) = delete;

  // Does what can be done; true once the call is complete. Throws Disagreement, and what the
  // transport throws.
  virtual bool advance() = 0;
  // Whether all ranks are known to make this call.
  bool agreed() const { return agreed_; }
  Waiting waiting() const { return waiting_; }
  const BoundCall& call() const { return call_; }
  // Grows whenever something has arrived or left.
  uint64_t progress() const { return progress_; }

 protected:
  // Moves the dissemination; true once all ranks are known to make this call.
  bool agree();
  void send_agreement(uint32_t peer);
  // Whether that of a peer has come; what is waited for if not.
  bool take_agreement(uint32_t peer);
  EagerHeader header(uint32_t nbytes) const;
  // The next packet of a peer for this call, or null.
  const EagerHeader* receive(Lane lane, uint32_t peer);

  MessageLink& link_;
  const BoundCall& call_;
  char *in_, *out_;
  uint64_t seq_;
  uint32_t check_;
  uint32_t distance_ = 0;  // of the dissemination; 0: not begun
  bool agreed_;
  Waiting waiting_;
  uint64_t progress_ = 0;
};

}  // namespace pycoll
