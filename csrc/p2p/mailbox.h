// Tagged messages between two ranks of a host. This folder uses the engine; read this file first,
// then postbox.h, which waits.
//
// Every ordered pair of ranks has a mailbox in the control segment: a ring of fragments, written by
// the sender only except for the count of fragments taken. A message is one or more fragments. A
// receiver that looks for another message stores those it finds.
//
// Of a message that is larger than its mailbox the fragment may be an offer: where the data lie in
// the memory of the sender, from where the receiver copies them once. The sender waits until it
// has; if it leaves before, it withdraws the offer, and what was copied counts for nothing.
// Receivers time both ways and report, beside the count of fragments taken, for which sizes they
// want offers (copy_choice.h).
//
// Cache lines that move per fragment: the ring's two counts, the fragment itself, the doorbell.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/copy_choice.h"
#include "engine/engine.h"

namespace pycoll {

// Of which large messages a sender offers its memory.
enum class Offers { kNever, kWanted, kAlways };

// Nothing here waits. One thread at a time, also beside another one that is in a call of the
// engine.
class Mailboxes {
 public:
  // A message to send; `offset` bytes of it have left.
  struct SendRequest {
    const char* data;
    uint64_t nbytes;
    uint32_t type, dst, tag;
    uint64_t offset = 0;
    bool sent = false;         // all of it
    bool single_copy = false;  // it is offered, not put into the mailbox
    bool offered = false;      // fragment `index` offers what lies behind `offset`
    uint32_t index = 0;
  };
  // A message to receive; src < 0: from any rank.
  struct RecvRequest {
    char* data;
    uint64_t nbytes;
    uint32_t type;
    int32_t src;
    uint32_t tag;
  };
  // What is known of a message before it is received.
  struct Envelope {
    uint32_t src, tag, type;
    uint64_t nbytes;
  };

  // `offers`: never where ranks are threads.
  explicit Mailboxes(std::shared_ptr<Engine> engine, Offers offers = Offers::kNever);

  uint32_t world_size() const { return world_size_; }

  // Smallest useful size of a mailbox, in bytes.
  static constexpr uint64_t kMinBytes = 1024;

  // Whether a message leaves in one piece.
  bool small(uint64_t nbytes) const { return nbytes <= fragment_bytes_; }

  // Puts as much of a message into the mailbox as there is room for. A message must be all sent
  // before the next one to the same rank is begun.
  void push(SendRequest& message);
  // Takes every fragment that lies in this rank's mailboxes; returns whether there was one. A
  // message that fits the first entry of `requests` with its source and tag goes straight there.
  bool drain(std::span<const RecvRequest> requests);
  // The sender of the oldest message that matches, which is copied if need be and removed; nothing
  // if it has not arrived in full. Throws MismatchError if its size or type is another one: it
  // stays.
  std::optional<uint32_t> collect(const RecvRequest& request);
  // The oldest message that has arrived, even in part, and that none of `requests` is to get; src <
  // 0 and tag < 0: any.
  std::optional<Envelope> peek(int32_t src, int64_t tag, std::span<const RecvRequest> requests);
  // Takes back what a message offers, because the sender gives up: its memory may be changed then.
  // Returns whether all of the message had been taken before that.
  bool withdraw(SendRequest& message);
  // Moves what has landed in a user's array so far to memory of our own, because the caller gives
  // up. Without memory for it the communicator fails.
  void keep_copies();
  // Forgets what has arrived: a user's array may be gone in which some of it lies.
  void drop_all() { arrived_.clear(); }

 private:
  struct Ring;
  struct Fragment;
  struct Message {
    uint32_t src, tag, type;
    uint64_t nbytes;
    uint64_t received;
    std::unique_ptr<char[]> own;
    char* data;
    bool single_copy;    // its sender offers it
    uint64_t begins_ns;  // of the clock, if it is large
  };

  Ring& ring(uint32_t src, uint32_t dst) const;
  Fragment& fragment(Ring& ring, uint32_t index) const;
  bool large(uint64_t nbytes) const;
  bool offers(const SendRequest& message) const;
  bool is_answered(SendRequest& message);
  void take(uint32_t src, std::span<const RecvRequest> requests);
  void read_offer(Fragment& part, Message& message);
  void choose(Ring& in, const Message& message);
  char* destination(uint32_t src, const Fragment& part, std::span<const RecvRequest> requests);
  Message* find(const RecvRequest& request);
  void ring_doorbell(uint32_t rank);
  static std::unique_ptr<char[]> allocate(uint64_t nbytes);
  std::string fail_without_memory(uint32_t src, uint64_t nbytes);

  std::shared_ptr<Engine> engine_;
  ControlSegment& control_;
  uint32_t rank_, world_size_;
  uint32_t fragment_bytes_;     // data of one fragment
  std::vector<Offers> offers_;  // to every rank: never to one that has refused
  // How the next message of a source and of a size comes; of sizes only the highest bit counts.
  std::map<std::pair<uint32_t, uint64_t>, CopyChoice> choices_;
  bool lost_ = false;  // there was no memory for a message: its fragments stay where they are
  std::vector<Message> arrived_;  // in order of arrival, complete or not
};

}  // namespace pycoll
