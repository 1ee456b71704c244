#include "transports/messages/packet_task.h"

#include <algorithm>
#include <cstring>

namespace pycoll {
namespace {

using Op = PacketPlan::Op;
using Piece = PacketPlan::Piece;
using Step = PacketPlan::Step;
using Where = PacketPlan::Where;

constexpr size_t kFewBytes = 512;  // which memcpy never moves as a string; see copy()

void move(char* to, const char* from, size_t nbytes) {
  if (nbytes <= kFewBytes) {
    std::memcpy(to, from, nbytes);
  } else {
    copy(to, from, nbytes);
  }
}

}  // namespace

PacketTask::PacketTask(MessageLink& link, const BoundCall& call, const void* in, void* out,
                       Turn turn, Scratch& scratch)
    : MessageTask(link, call, in, out, turn), plan_(call.packets), scratch_(scratch) {
  const uint64_t cells = call.plan->slots * call.stride;
  if (scratch.cells.size() < cells) scratch.cells.resize(cells);
  if (scratch.places.size() < plan_.most_pieces) scratch.places.resize(plan_.most_pieces);
}

bool PacketTask::advance() {
  waiting_ = {};
  if (!agreed_) begin_agreement();
  for (const size_t end = plan_.steps.size(); next_ < end; ++next_) {
    const Step& step = plan_.steps[next_];
    switch (step.op) {
      case Op::kSend:
        send(step);
        break;
      case Op::kReceive:
        if (!receive_together()) return false;
        next_ += step.together - 1;
        break;
      case Op::kRelease:
        link_.release(Lane::kEager, step.peer);
        break;
      case Op::kCopy:
        copy_piece(step);
        break;
      case Op::kFold:
        fold_pieces(step);
        break;
      case Op::kScale:
        if (out_ == nullptr) break;
        scale(call_.dtype, at(plan_.pieces[step.first]), step.count, call_.scale_n);
        break;
    }
  }
  if (plan_.hears) agreed_ = true;
  // Behind what this rank sends: the other one waits for that.
  if (!agreed_ && plan_.tells) agreed_ = take_agreement(plan_.other);
  return agreed_ && link_.flushed(seq_);
}

// Of two ranks, one that gets a packet need not be told besides that its sender is here.
void PacketTask::begin_agreement() {
  if (!plan_.tells && !plan_.hears) {
    agree();
  } else if (!plan_.tells && distance_ == 0) {
    distance_ = 1;
    send_agreement(plan_.other);
  }
}

void PacketTask::send(const Step& step) {
  char* const room = link_.open_eager();
  const Piece* const pieces = plan_.pieces.data() + step.first;
  for (uint32_t i = 0; i < step.pieces; ++i) {
    move(room + pieces[i].place, at(pieces[i]), pieces[i].nbytes);
  }
  link_.send_eager(Lane::kEager, step.peer, header(step.most));
}

// Takes the packets that the next steps await, as they come; true once there are all.
bool PacketTask::receive_together() {
  const Step* const steps = &plan_.steps[next_];
  const uint32_t count = steps->together;
  if (taken_ == 0) scratch_.taken.assign(count, false);
  int32_t missing = -1;  // peer; packets of one peer are behind each other, in order
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t peer = steps[i].peer;
    if (peer == missing || scratch_.taken[i]) continue;
    if (take(steps[i])) {
      scratch_.taken[i] = true;
      ++taken_;
      ++progress_;
      continue;
    }
    missing = peer;
    if (waiting_.peer < 0) waiting_ = {peer, steps[i].round + 2};
  }
  if (taken_ < count) return false;
  taken_ = 0;
  return true;
}

bool PacketTask::take(const Step& step) {
  const EagerHeader* const found = receive(Lane::kEager, step.peer);
  if (found == nullptr) return false;
  const uint32_t nbytes = found->nbytes;
  if (nbytes > step.most || nbytes < step.least) {
    link_.reject(step.peer, "data of another size than this call has");
  }
  if (step.kept) return true;
  const Piece* const pieces = plan_.pieces.data() + step.first;
  for (uint32_t i = 0; i < step.pieces && pieces[i].place < nbytes; ++i) {
    const uint64_t there = std::min<uint64_t>(pieces[i].nbytes, nbytes - pieces[i].place);
    move(at(pieces[i]), found->data() + pieces[i].place, there);
  }
  link_.release(Lane::kEager, step.peer);
  return true;
}

void PacketTask::copy_piece(const Step& step) {
  const Piece* const pieces = plan_.pieces.data() + step.first;
  const char* const from = at(pieces[0]);
  for (uint32_t i = 1; i < step.pieces; ++i) {
    char* const to = at(pieces[i]);
    if (to != from) move(to, from, step.count);
  }
}

void PacketTask::fold_pieces(const Step& step) {
  const Piece* const pieces = plan_.pieces.data() + step.first;
  void** const places = scratch_.places.data();
  for (uint32_t i = 0; i < step.pieces; ++i) places[i] = at(pieces[i]);
  fold(step.spec, places, static_cast<int>(step.sources), places + step.sources,
       static_cast<int>(step.pieces - step.sources), step.count);
}

char* PacketTask::at(const Piece& piece) {
  switch (piece.where) {
    case Where::kIn:
      return in_ + piece.at;
    case Where::kOut:
      return out_ + piece.at;
    case Where::kCells:
      return scratch_.cells.data() + piece.at;
    default:
      return link_.packet(piece.peer) + piece.at;
  }
}

}  // namespace pycoll
