// Tagged messages between two ranks, over messages; see postbox.h for what they promise.
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
#include <vector>

#include "transports/messages/message_engine.h"

namespace pycoll {

// For any number of threads. The transport moves bytes by itself; matching is done by whoever waits
// or looks.
class MessagePostbox {
 public:
  using Ticket = uint64_t;
  // What is known of a message before it is received.
  struct Envelope {
    uint32_t src, tag, type;
    uint64_t nbytes;
  };

  explicit MessagePostbox(std::shared_ptr<MessageEngine> engine) : engine_(std::move(engine)) {}
  // Whether the communicator has failed: then nothing more is received.
  bool failed() const { return engine_->failed(); }
  // Payload that is still to come keeps its memory.
  ~MessagePostbox();
  MessagePostbox(const MessagePostbox&) = delete;
  MessagePostbox& operator=(const MessagePostbox&) = delete;

  uint32_t world_size() const { return engine_->world_size(); }

  // See Postbox.
  Ticket send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag);
  Ticket recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag);
  bool done(Ticket ticket);
  bool forget(Ticket ticket);
  std::optional<Envelope> probe(int32_t src, int64_t tag, double timeout_s);
  uint32_t wait(Ticket ticket, double timeout_s);
  void finish_send(Ticket ticket, double timeout_s);
  void close();

  // Send and finish_send, and receive and wait.
  void send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
            double timeout_s);
  uint32_t recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                double timeout_s);
  // See Postbox.
  std::optional<uint32_t> take_found(const Envelope& found, void* data, uint64_t nbytes,
                                     uint32_t type, double timeout_s);
  // So many of these sends were given up while the transport may have been reading their data,
  // which must stay.
  uint64_t given_up() const { return given_up_; }

 private:
  // A message of this rank that is posted.
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
  // A message that others have sent.
  struct Message {
    uint32_t src, tag, type;
    uint64_t nbytes;
    bool complete = true;           // otherwise its payload is still to come
    bool claimed = false;           // then a posted recv waits for its payload
    std::unique_ptr<char[]> own{};  // null: payload that has not been asked for yet
    std::vector<Request> requests{};
  };

  std::vector<Request> post(const Item& item, const void* data);
  Ticket expect(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag);
  uint32_t wait_or_forget(Ticket ticket, double timeout_s);
  void progress();
  void drain();
  void receive_all();
  void receive_payload(Message& message);
  std::optional<uint32_t> collect(const Item& item);
  std::list<Message>::iterator find(int32_t src, uint32_t tag, bool also_claimed);
  std::optional<Envelope> peek(int32_t src, int64_t tag);
  std::string describe(const Item& item) const;

  std::shared_ptr<MessageEngine> engine_;
  std::atomic<uint64_t> given_up_{0};
  // Of everything below: the engine's mutex.
  std::unordered_map<Ticket, Item> items_;
  std::deque<Ticket> incoming_;  // posted and not done, in order
  Ticket newest_ = 0;
  std::list<Message> arrived_;  // in order of arrival, complete or not
  uint64_t coming_ = 0;         // of these, those that are not complete
};

}  // namespace pycoll
