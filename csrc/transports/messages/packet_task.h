// A call whose messages are all small: it carries out a PacketPlan.
#pragma once

#include <vector>

#include "engine/packets.h"
#include "transports/messages/message_task.h"

namespace pycoll {

class PacketTask final : public MessageTask {
 public:
  // Memory of a task, kept by the caller from call to call.
  struct Scratch {
    std::vector<char> cells;
    std::vector<bool> taken;  // of the receives that are awaited together
    std::vector<void*> places;
  };
  PacketTask(MessageLink& link, const BoundCall& call, const void* in, void* out, Turn turn,
             Scratch& scratch);

  bool advance() override;

 private:
  void begin_agreement();
  void send(const PacketPlan::Step& step);
  bool receive_together();
  bool take(const PacketPlan::Step& step);
  void copy_piece(const PacketPlan::Step& step);
  void fold_pieces(const PacketPlan::Step& step);
  char* at(const PacketPlan::Piece& piece);

  const PacketPlan& plan_;
  Scratch& scratch_;
  size_t next_ = 0;     // step
  uint32_t taken_ = 0;  // of the receives that are awaited now
};

}  // namespace pycoll
