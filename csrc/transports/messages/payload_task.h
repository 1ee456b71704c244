// A call with messages larger than a packet: the interpreter of message plans.
//
// Once all ranks agree, payload moves between their arrays, in segments of which up to kWindows are
// under way at the same time.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "transports/messages/message_task.h"

namespace pycoll {

class PayloadTask final : public MessageTask {
 public:
  class Scratch;  // memory of a task, kept by the caller from call to call
  PayloadTask(MessageLink& link, const BoundCall& call, const void* in, void* out, Turn turn,
              Scratch& scratch);
  // Memory that the transport may still write or read is never freed.
  ~PayloadTask() override;

  bool advance() override;

 private:
  struct Transfer {  // one message under way
    const Instr* instr;
    uint32_t first, chunks;  // of instr->count
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

  bool advance(Window& window, int lane);
  void begin(Window& window);
  void post(Window& window, int lane);
  void post_one(Window& window, int lane, const Instr& instr, uint32_t first, uint32_t chunks);
  bool complete(Window& window);
  void fold_pieces(Window& window, const Instr& instr);
  char* resolve(const Window& window, const Operand& operand, uint32_t k, uint64_t& length) const;
  Span span(const Window& window, const Operand& operand, uint32_t first, uint32_t chunks) const;
  uint64_t needed(const Window& window, const Operand& operand, uint32_t first,
                  uint32_t chunks) const;
  uint64_t gather(const Window& w, const Operand& o, uint32_t first, uint32_t chunks, char* to);
  void scatter(const Window& w, const Operand& o, uint32_t first, uint32_t chunks, const char* from,
               uint64_t nbytes);
  void scale_out();

  std::span<Window> windows_;
  bool scaled_ = false;
  Scratch& scratch_;
  std::vector<const void*>& srcs_;
  std::vector<void*>& dsts_;
};

class PayloadTask::Scratch {
  friend PayloadTask;
  std::vector<char> cells;
  std::vector<Window> windows;
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
};

}  // namespace pycoll
