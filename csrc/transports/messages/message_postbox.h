// Tagged messages between two ranks, over messages; see mailbox.h and postbox.h for what they
// promise.
//
// A small message travels eagerly. A large one is announced by a header and follows as payload, in
// the order of the announcements. Whoever waits receives whatever else has been announced into
// memory of its own, so two ranks that send to each other do not block one another.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/one_thread.h"
#include "transports/messages/message_engine.h"

namespace pycoll {

class MessageMailbox {
 public:
  explicit MessageMailbox(std::shared_ptr<MessageEngine> engine) : engine_(std::move(engine)) {}
  // Payload that is still to come keeps its memory.
  ~MessageMailbox();
  MessageMailbox(const MessageMailbox&) = delete;
  MessageMailbox& operator=(const MessageMailbox&) = delete;

  // One thread at a time (ConcurrentUseError otherwise), as of Mailboxes.
  void send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
            double timeout_s);
  uint32_t recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                double timeout_s);

  // So many sends were given up while the transport was still reading their data, which must stay.
  uint64_t given_up() const { return given_up_; }

  // The steps of these two, for MessagePostbox. The caller holds the engine's mutex.
  //
  // Sends a message; the memory must stay until the requests returned are done.
  std::vector<Request> post(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst,
                            uint32_t tag);
  // Receives every eager message that has arrived, and payload in the order of its announcements.
  void drain();
  // Moves the first message of a source (src < 0: of any) and tag to `data` if it is there, and
  // returns the sender. Throws MismatchError if it has another size or type.
  std::optional<uint32_t> collect(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                                  uint32_t tag);
  // The oldest message that was announced and that none of those who wait, by source and tag, is to
  // get; src < 0 and tag < 0: any.
  struct Envelope {
    uint32_t src, tag, type;
    uint64_t nbytes;
  };
  std::optional<Envelope> peek(int32_t src, int64_t tag,
                               const std::vector<std::pair<int32_t, uint32_t>>& waiting);
  // Whether such a message has been announced: it still arrives if its sender has closed.
  bool announced(int32_t src, uint32_t tag) { return find(src, tag) != nullptr; }

 private:
  struct Message {
    uint32_t src, tag, type;
    uint64_t nbytes;
    bool complete = true;           // otherwise its payload is still to come
    std::unique_ptr<char[]> own{};  // null: payload that has not been asked for yet
    std::vector<Request> requests{};
  };

  void receive_all();
  void receive_payload(Message& message);
  Message* find(int32_t src, uint32_t tag);

  std::shared_ptr<MessageEngine> engine_;
  User user_{0};  // the thread that is in send() or recv()
  std::atomic<uint64_t> given_up_{0};
  std::list<Message> arrived_;  // in order of arrival, complete or not
};

// Tagged messages in the background. The transport moves bytes by itself; matching is done by
// whoever waits or looks. For any number of threads. A rank that has a postbox must not use a
// MessageMailbox otherwise.
class MessagePostbox {
 public:
  using Ticket = uint64_t;

  explicit MessagePostbox(std::shared_ptr<MessageEngine> engine)
      : MessagePostbox(engine, std::make_shared<MessageMailbox>(engine)) {}
  // Goes on with a mailbox that was used by itself, and with what has arrived in it.
  MessagePostbox(std::shared_ptr<MessageEngine> engine, std::shared_ptr<MessageMailbox> mailbox)
      : engine_(std::move(engine)), mailbox_(std::move(mailbox)) {}
  ~MessagePostbox() { close(); }
  MessagePostbox(const MessagePostbox&) = delete;
  MessagePostbox& operator=(const MessagePostbox&) = delete;

  // See Postbox.
  Ticket send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag);
  Ticket recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag);
  bool done(Ticket ticket);
  void forget(Ticket ticket);
  std::optional<MessageMailbox::Envelope> probe(int32_t src, int64_t tag, double timeout_s);
  uint32_t wait(Ticket ticket, double timeout_s);
  void close();

 private:
  struct Item {
    void* data = nullptr;
    uint64_t nbytes = 0;
    uint32_t type = 0;
    int32_t peer = -1;
    uint32_t tag = 0;
    bool incoming = false, done = false, awaited = false;
    std::vector<Request> parts{};  // of a message that is being sent
    uint32_t sender = 0;
    std::exception_ptr error{};
  };

  void progress();
  std::string describe(const Item& item) const;

  std::shared_ptr<MessageEngine> engine_;
  std::shared_ptr<MessageMailbox> mailbox_;
  // Of everything below: the engine's mutex.
  std::unordered_map<Ticket, Item> items_;
  std::deque<Ticket> incoming_;  // posted and not done, in order
  Ticket newest_ = 0;
};

}  // namespace pycoll
