// One call over messages: the interpreter of message plans, as a machine that never waits.
//
// A call whose messages are all small sends them eagerly, each with the call's descriptor in its
// header. Any other call is a rendezvous: a dissemination among all ranks makes sure that they are
// all in the same call; then payload moves, in segments of which up to kWindows are under way at
// the same time. So nothing reaches a user's array, and nothing refers to one, before all ranks
// agree. Calls in which a rank does not depend on all others (those with a root) agree in any case.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "transports/messages/message_link.h"

namespace pycoll {

// What a task waits for, for reports.
struct Waiting {
  int32_t peer = -1;
  uint32_t step = 0;  // kEntered: to make the call; else round + 2
};

// Thrown if an eager message of this call has another descriptor or count.
struct Disagreement {
  uint32_t peer;
  EagerHeader header;
};

class MessageTask {
 public:
  class Scratch;
  // Which call it is. The parity of `seq` tells the payload of two calls in flight apart, so a link
  // has at most kBatch tasks. `check` is what headers have. `proven`: all ranks are known to make
  // this call, or it is left before they are.
  struct Turn {
    uint64_t seq;
    uint32_t check;
    bool proven;
  };
  // `in` and `out` hold at least call.in_bytes and call.out_bytes. `scratch` is kept by the caller
  // from call to call.
  MessageTask(MessageLink& link, const BoundCall& call, const void* in, void* out, Turn turn,
              Scratch& scratch);
  // Cancels what is under way, after a failure. Memory that the transport may still write or read
  // is never freed.
  ~MessageTask();
  MessageTask(const MessageTask&) = delete;
  MessageTask& operator=(const MessageTask&) = delete;

  // Does what can be done; true once the call is complete. Throws Disagreement, and what the
  // transport throws.
  bool advance();
  // Whether all ranks are known to make this call.
  bool agreed() const { return agreed_; }
  Waiting waiting() const { return waiting_; }
  const BoundCall& call() const { return call_; }
  // Grows whenever something has arrived or left.
  uint64_t progress() const { return progress_; }

 private:
  struct Transfer {  // one message under way
    const Instr* instr;
    uint32_t first, chunks;  // of instr->count
    bool eager;
    Request request = 0;
    std::unique_ptr<char[]> bounce{};  // holds pieces that are not contiguous in the array
  };
  struct Window {          // one segment in flight
    uint32_t segment = 0;  // present or next
    size_t pc = 0;
    bool active = false, posted = false;
    uint64_t start = 0, reach = 0;
    char* cells = nullptr;
    std::vector<Transfer> open{};
  };
  struct Span {  // chunks of one operand
    char* data;
    uint64_t nbytes;  // that it really has
    bool whole;       // contiguous, and all chunks have their full length
  };

  bool agree();
  bool advance(Window& window, int lane);
  void begin(Window& window);
  void post(Window& window, int lane);
  void post_one(Window& window, int lane, const Instr& instr, uint32_t first, uint32_t chunks);
  bool complete(Window& window);
  bool take_eager(Window& window, Transfer& transfer);
  void fold_pieces(Window& window, const Instr& instr);
  char* resolve(const Window& window, const Operand& operand, uint32_t k, uint64_t& length) const;
  Span span(const Window& window, const Operand& operand, uint32_t first, uint32_t chunks) const;
  uint64_t needed(const Window& window, const Operand& operand, uint32_t first,
                  uint32_t chunks) const;
  uint64_t gather(const Window& w, const Operand& o, uint32_t first, uint32_t chunks, char* to);
  void scatter(const Window& w, const Operand& o, uint32_t first, uint32_t chunks, const char* from,
               uint64_t nbytes);
  void scale_out();
  EagerHeader header(uint32_t nbytes) const;
  const EagerHeader* receive_eager(Lane lane, uint32_t peer);

  MessageLink& link_;
  const BoundCall& call_;
  char *in_, *out_;
  uint64_t seq_;
  uint32_t check_;
  uint32_t distance_ = 0;  // of the agreement; 0: not begun
  bool agreed_;
  bool scaled_ = false;
  Waiting waiting_;
  std::span<Window> windows_;
  std::span<uint32_t> blocked_;  // by peer: pass in which an earlier eager message was missing
  uint32_t pass_ = 0;
  uint64_t progress_ = 0;
  Scratch& scratch_;
  std::vector<const void*>& srcs_;
  std::vector<void*>& dsts_;
};

// Memory of a task, reused by the next.
class MessageTask::Scratch {
  friend MessageTask;
  std::vector<char> cells;
  std::vector<Window> windows;
  std::vector<uint32_t> blocked;
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
};

}  // namespace pycoll
