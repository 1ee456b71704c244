// Tagged messages between two ranks, over MPI; see mailbox.h for what they promise.
//
// A small message travels in its packet. A large one is announced by a packet and follows as bare
// data, in the order of the announcements. Who waits takes whatever else has been announced into
// memory of its own, so two ranks that send to each other do not block one another.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <optional>

#include "base/one_thread.h"
#include "transports/messages/message_engine.h"

namespace pycoll {

class MpiMail {
 public:
  explicit MpiMail(std::shared_ptr<MpiEngine> engine) : engine_(std::move(engine)) {}
  // Bare data that is still to come gets memory that nobody else uses.
  ~MpiMail();
  MpiMail(const MpiMail&) = delete;
  MpiMail& operator=(const MpiMail&) = delete;

  // One thread at a time (ConcurrentUseError otherwise), as of Mailboxes.
  void send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
            double timeout_s);
  uint32_t recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                double timeout_s);

  // So many sends were given up while the transport was still reading their data, which must stay.
  uint64_t given_up() const { return given_up_; }

  // The steps of these two, for who waits by himself (see message_postbox.h). The caller holds the
  // engine's mutex.
  //
  // Sends a message; the memory must stay until the requests returned are done.
  std::vector<MpiRequest> post(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst,
                               uint32_t tag);
  // Takes every packet that has arrived, and bare data in the order of its announcements.
  void drain();
  // Moves the first message of a source (src < 0: of any) and tag to `data` if it is there, and
  // returns the sender. Throws MismatchError if it has another size or type.
  std::optional<uint32_t> collect(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                                  uint32_t tag);
  // Whether such a message has been announced: it still arrives if its sender has closed.
  bool announced(int32_t src, uint32_t tag) { return find(src, tag) != nullptr; }

 private:
  struct Message {
    uint32_t src, tag, type;
    uint64_t nbytes;
    bool bulk;  // follows as bare data
    bool complete = false;
    std::unique_ptr<char[]> own{};  // null: bare data that has not been asked for yet
    std::vector<MpiRequest> under_way{};
  };

  void fetch(Message& message);
  bool first_bulk(const Message& message) const;
  Message* find(int32_t src, uint32_t tag);
  template <typename F>
  bool each_part(uint64_t nbytes, F&& f);

  std::shared_ptr<MpiEngine> engine_;
  User user_{0};  // the thread that is in send() or recv()
  std::atomic<uint64_t> given_up_{0};
  std::list<Message> arrived_;  // in order of arrival, complete or not
};

}  // namespace pycoll
