#include "p2p/message_postbox.h"

#include "base/erase_done.h"
#include "base/error.h"
#include "engine/engine.h"
#include "engine/fault.h"

namespace pycoll {

MailPostbox::MailPostbox(std::shared_ptr<MpiEngine> engine)
    : engine_(std::move(engine)), mail_(engine_) {}

MailPostbox::Ticket MailPostbox::send(const void* data, uint64_t nbytes, uint32_t type,
                                      uint32_t dst, uint32_t tag) {
  COLL_CHECK(!engine_->check(static_cast<int32_t>(dst), Pulse::kOnce), "PeerLeft",
             "send from rank ", engine_->link().rank(), " to rank ", dst,
             closed_text(static_cast<int32_t>(dst)));
  const std::lock_guard lock(engine_->mutex());
  mail_.drain();  // throws if a rank has died
  Item item{.nbytes = nbytes, .type = type, .peer = static_cast<int32_t>(dst), .tag = tag};
  item.parts = mail_.post(data, nbytes, type, dst, tag);
  item.sender = engine_->link().rank();
  if (item.parts.empty()) return 0;  // it was copied
  items_.emplace(++newest_, std::move(item));
  return newest_;
}

MailPostbox::Ticket MailPostbox::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                                      uint32_t tag) {
  engine_->poll();
  const std::lock_guard lock(engine_->mutex());
  Item item{.data = data, .nbytes = nbytes, .type = type, .peer = src, .tag = tag};
  item.incoming = true;
  items_.emplace(++newest_, std::move(item));
  incoming_.push_back(newest_);
  progress();
  return newest_;
}

// Moves everything that can be moved. The mutex is held.
void MailPostbox::progress() {
  mail_.drain();
  std::erase_if(incoming_, [&](Ticket ticket) {
    Item& item = items_.at(ticket);
    try {
      const auto sender = mail_.collect(item.data, item.nbytes, item.type, item.peer, item.tag);
      if (!sender) return false;
      item.sender = *sender;
    } catch (const Error&) {
      item.error = std::current_exception();
    }
    item.done = true;
    return true;
  });
  for (auto& [ticket, item] : items_) {
    if (item.incoming || item.done) continue;
    erase_done(item.parts, [&](MpiRequest& part) { return engine_->link().test(part); });
    item.done = item.parts.empty();
  }
}

bool MailPostbox::done(Ticket ticket) {
  if (!engine_->at_home()) return false;  // messages are the parent's; so may be the mutex
  const std::lock_guard lock(engine_->mutex());
  progress();
  const auto found = items_.find(ticket);
  return found == items_.end() || found->second.done;
}

uint32_t MailPostbox::wait(Ticket ticket, double timeout_s) {
  COLL_CHECK(engine_->at_home(), "ForkedError", "message ", ticket,
             " belongs to the parent process");
  const uint64_t deadline = deadline_after(timeout_s);
  Item* item = nullptr;
  {
    const std::lock_guard lock(engine_->mutex());
    const auto found = items_.find(ticket);
    COLL_CHECK(found != items_.end(), "ArgumentError", "message ", ticket,
               " was waited for, or its communicator closed");
    item = &found->second;  // stays where it is while others come and go
    COLL_CHECK(!item->awaited, "ConcurrentUseError", "another thread waits for message ", ticket);
    item->awaited = true;
  }
  struct Leave {
    MailPostbox& box;
    Ticket ticket;
    ~Leave() {
      const std::lock_guard lock(box.engine_->mutex());
      const auto left = box.items_.find(ticket);
      if (left != box.items_.end()) left->second.awaited = false;
    }
  } leave{*this, ticket};
  const auto arrived = [&] {
    const std::lock_guard lock(engine_->mutex());
    progress();
    return item->done;
  };
  bool finished = false;
  try {
    finished = wait_until(engine_->policy(), Bell{}, arrived, [&](Pulse pulse) {
      const bool closed = engine_->check(item->peer, pulse);
      const std::lock_guard lock(engine_->mutex());
      const bool coming = item->incoming && mail_.announced(item->peer, item->tag);
      return (closed && !coming) || now_ns() >= deadline;
    });
  } catch (const Error&) {  // whoever hears of it may change or free the memory
    const std::lock_guard lock(engine_->mutex());
    incoming_.clear();
    throw;
  }
  if (!finished) {
    COLL_CHECK(now_ns() >= deadline, "PeerLeft", describe(*item), closed_text(item->peer));
    throw_error("CollTimeout", describe(*item), ": not done within ", timeout_s, " s");
  }
  const std::lock_guard lock(engine_->mutex());
  const std::exception_ptr error = item->error;
  const uint32_t sender = item->sender;
  items_.erase(ticket);
  if (error != nullptr) std::rethrow_exception(error);
  return sender;
}

std::string MailPostbox::describe(const Item& item) const {
  std::ostringstream out;
  const std::string peer = rank_name(item.peer);
  const uint32_t rank = engine_->link().rank();
  if (item.incoming) {
    out << "recv on rank " << rank << " from " << peer;
  } else {
    out << "send from rank " << rank << " to " << peer;
  }
  out << " (tag " << item.tag << ", " << item.nbytes << " bytes)";
  return out.str();
}

// What is still being sent may refer to memory of the user: the transport is closed after this.
void MailPostbox::close() {
  if (!engine_->at_home()) return;  // a thread of the parent may hold the mutex for ever
  const std::lock_guard lock(engine_->mutex());
  incoming_.clear();
}

}  // namespace pycoll
