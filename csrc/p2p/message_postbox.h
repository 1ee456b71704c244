// What Postbox is for shared memory, for ranks that send each other messages: tagged messages in
// the background, on top of MpiMail. The transport moves bytes by itself; matching is done by
// whoever waits or looks.
#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transports/messages/message_mail.h"

namespace pycoll {

// For any number of threads. A rank that has a postbox must not use an MpiMail otherwise.
class MailPostbox {
 public:
  using Ticket = uint64_t;

  explicit MailPostbox(std::shared_ptr<MpiEngine> engine);
  ~MailPostbox() { close(); }
  MailPostbox(const MailPostbox&) = delete;
  MailPostbox& operator=(const MailPostbox&) = delete;

  // See Postbox.
  Ticket send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag);
  Ticket recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag);
  bool done(Ticket ticket);
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
    std::vector<MpiRequest> parts{};  // of a message that is being sent
    uint32_t sender = 0;
    std::exception_ptr error{};
  };

  void progress();
  std::string describe(const Item& item) const;

  std::shared_ptr<MpiEngine> engine_;
  MpiMail mail_;
  // Of everything below: the engine's mutex.
  std::unordered_map<Ticket, Item> items_;
  std::deque<Ticket> incoming_;  // posted and not done, in order
  Ticket newest_ = 0;
};

}  // namespace pycoll
