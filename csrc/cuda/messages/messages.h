// Messages from one rank to one other: a launch of the sender and one of the receiver, which meet
// nobody else. Who sends what to whom the hosts know before; see pycoll/cuda/calls/messages.py.
//
// A message is cut into parts, each the work of one block on either side. The parts from one rank
// to another are numbered, over all messages, and part i is at place i % kMessagePlaces of the
// pair. Each side of a place has a count in its control memory, which the other side writes: of the
// parts that were sent, and of those that were taken. A part is sent when the one before at its
// place is taken, so the two differ by one at most. Parts at different places know nothing of each
// other: messages may be received in any order, and be sent on several streams.
//
// A slotted message goes through slots at the receiver, one for each place: the sender copies its
// parts there. Of another one only the counts are sent, and the receiver copies it from the
// sender's heap, in as many parts as keep its blocks busy.
#pragma once

#include "cuda/kernels/signals.h"

namespace pycoll::cuda {

inline constexpr uint32_t kMessagePlaces = 64;                 // of a pair of ranks
inline constexpr uint64_t kMessageMemory = uint64_t{4} << 20;  // of a rank, for slots, about

// What a rank waits for: PycollCudaError::instruction.
inline constexpr uint32_t kForRoom = 0xFFFFFFFC, kForMessage = 0xFFFFFFFD,
                          kForReceiver = 0xFFFFFFFE;

// Memory of a rank for a place of the pair with a peer; the peer writes it.
struct MessagePlace {
  uint32_t sent;   // parts from the peer
  uint32_t taken;  // parts to the peer
};

PYCOLL_BOTH uint64_t places_offset(uint32_t n, uint32_t max_blocks) {
  return (control_bytes(n, max_blocks) + 127) / 128 * 128;
}
PYCOLL_BOTH uint64_t message_slots_offset(uint32_t n, uint32_t max_blocks) {
  return places_offset(n, max_blocks) + uint64_t{n} * kMessagePlaces * sizeof(MessagePlace);
}
// Bytes of a slot.
PYCOLL_BOTH uint64_t message_slot(uint32_t n) {
  return kMessageMemory / (n * kMessagePlaces) / 128 * 128;
}
// Control memory of a rank that takes part in messages.
PYCOLL_BOTH uint64_t message_bytes(uint32_t n, uint32_t max_blocks) {
  return message_slots_offset(n, max_blocks) + uint64_t{n} * kMessagePlaces * message_slot(n);
}

// One side of a message.
struct MessageEnd {
  uint32_t peer;
  uint32_t parts;
  uint64_t number;        // of the first part
  uint64_t nbytes, part;  // of the message, and of each part but the last
  char* array;            // what is sent, or where it is received
  char* slots;            // of the pair, at the receiver; null: not slotted
};

// Parameters of a launch, of the sender or of the receiver.
struct MessageLaunch {
  Launch call;      // its arrays and numbers of plans are not used
  uint64_t places;  // places_offset
  MessageEnd end;
  const char* from;  // receiver: where the message lies, if it is not slotted
  uint32_t receives;
  uint32_t posts, awaits;  // sender: whether it sends now, and waits for the receiver
};

template <typename P>
class Messages {
 public:
  PYCOLL_DEVICE Messages(Member<P>& member, const MessageLaunch& launch)
      : m_(member), a_(launch), p_(member.p()) {}

  // False: this rank has to leave; likewise below.
  PYCOLL_DEVICE bool send() const {
    const MessageEnd& end = a_.end;
    if (end.slots == nullptr) {  // by one block: there is nothing to copy
      bool fine = true;
      for (uint32_t j = p_.tid(); j < end.parts; j += p_.threads()) {
        fine = fine && await(own(end, j).taken, rounds(end, j), end.peer, kForRoom);
        if (fine) p_.store_release(&theirs(end, j).sent, rounds(end, j) + 1);
      }
      return !p_.any(!fine);
    }
    PYCOLL_ROLLED
    for (uint32_t j = m_.block(); j < end.parts; j += a_.call.nblocks) {
      if (!one_awaits(own(end, j).taken, rounds(end, j), end.peer, kForRoom)) return false;
      copy(end, j, end.array + j * end.part, slot(end, j));
      p_.barrier();
      if (p_.tid() == 0) p_.store_release(&theirs(end, j).sent, rounds(end, j) + 1);
    }
    return true;
  }

  PYCOLL_DEVICE bool receive() const {
    const MessageEnd& end = a_.end;
    PYCOLL_ROLLED
    for (uint32_t j = m_.block(); j < end.parts; j += a_.call.nblocks) {
      if (!one_awaits(own(end, j).sent, rounds(end, j) + 1, end.peer, kForMessage)) return false;
      copy(end, j, end.slots != nullptr ? slot(end, j) : a_.from + j * end.part,
           end.array + j * end.part);
      p_.barrier();
      if (p_.tid() == 0) p_.store_release(&theirs(end, j).taken, rounds(end, j) + 1);
    }
    return true;
  }

  // By one block: waits until the receiver has what was sent. A part before the last ones is taken
  // if the one after it at its place has been sent.
  PYCOLL_DEVICE bool settle() const {
    const MessageEnd& end = a_.end;
    const uint32_t first = end.parts > kMessagePlaces ? end.parts - kMessagePlaces : 0;
    bool fine = true;
    for (uint32_t j = first + p_.tid(); j < end.parts; j += p_.threads()) {
      fine = fine && await(own(end, j).taken, rounds(end, j) + 1, end.peer, kForReceiver);
    }
    return !p_.any(!fine);
  }

 private:
  // Part j of a message: how many there were at its place before, modulo 2^32; memory of its place.
  static PYCOLL_DEVICE uint32_t rounds(const MessageEnd& end, uint32_t j) {
    return static_cast<uint32_t>((end.number + j) / kMessagePlaces);
  }
  static PYCOLL_DEVICE uint32_t place(const MessageEnd& end, uint32_t j) {
    return static_cast<uint32_t>((end.number + j) % kMessagePlaces);
  }
  PYCOLL_DEVICE MessagePlace& at(uint32_t rank, uint32_t peer, uint32_t place) const {
    auto* const places = reinterpret_cast<MessagePlace*>(a_.call.control[rank] + a_.places);
    return places[peer * kMessagePlaces + place];
  }
  PYCOLL_DEVICE const MessagePlace& own(const MessageEnd& end, uint32_t j) const {
    return at(m_.rank(), end.peer, place(end, j));
  }
  PYCOLL_DEVICE MessagePlace& theirs(const MessageEnd& end, uint32_t j) const {
    return at(end.peer, m_.rank(), place(end, j));
  }
  PYCOLL_DEVICE char* slot(const MessageEnd& end, uint32_t j) const {
    return end.slots + place(end, j) * end.part;
  }

  // By one thread.
  PYCOLL_DEVICE bool await(const uint32_t& count, uint32_t wanted, uint32_t peer,
                           uint32_t why) const {
    Awaited what{peer, wanted, 0, why};
    return m_.poll(what, [&] {
      what.seen = p_.load_acquire(&count);
      return reached(what.seen, wanted);
    });
  }

  // By all threads.
  PYCOLL_DEVICE bool one_awaits(const uint32_t& count, uint32_t wanted, uint32_t peer,
                                uint32_t why) const {
    return !p_.any(p_.tid() == 0 && !await(count, wanted, peer, why));
  }

  PYCOLL_DEVICE void copy(const MessageEnd& end, uint32_t j, const char* from, char* to) const {
    const FoldView view{&from, &to, 1, 1, false, {0, false}};
    const uint64_t rest = end.nbytes - j * end.part;
    using Bytes = Copier<P>;
    fold_range<Bytes, 1>(
        p_, view, 0, rest < end.part ? rest : end.part,
        [&](uint64_t begin, uint64_t stop) { Bytes::template range<16>(p_, view, begin, stop); });
  }

  Member<P>& m_;
  const MessageLaunch& a_;
  const P& p_;
};

// One block of one rank.
template <typename P>
PYCOLL_DEVICE void run_messages(const P& p, const MessageLaunch& launch, uint32_t block) {
  Member<P> m(p, launch.call, launch.call.first_rank, block);
  bool aborted;
  (void)m.begin_packets(aborted);
  if (p.any(aborted)) {
    if (p.tid() == 0) m.report(Fault::kFollowed, {m.rank(), 0, 0, kOutside});
    return;
  }
  const Messages<P> messages(m, launch);
  if (launch.receives != 0) {
    (void)messages.receive();
    return;
  }
  if (launch.posts != 0 && !messages.send()) return;
  if (launch.awaits != 0 && block == 0) (void)messages.settle();
}

extern const void* const kMessageKernel;  // (MessageLaunch)

}  // namespace pycoll::cuda
