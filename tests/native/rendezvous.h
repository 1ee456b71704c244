// What MPIs do with messages above their eager limit: a send is not done before somebody posts the
// receive. Sockets, which the native tests use, take everything at once.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "hosts.h"

namespace hosts {

// How many messages of a rank to another with a tag have found a receive. All ranks share it.
class Receipts {
 public:
  using Way = std::tuple<int, int, int>;  // src, dst, tag

  // The number of a message that is being sent.
  uint64_t send(const Way& way) {
    const std::lock_guard lock(mutex_);
    return ++ways_[way].sent;
  }
  void receive(const Way& way, int more) {
    const std::lock_guard lock(mutex_);
    ways_[way].posted += more;
  }
  bool found(const Way& way, uint64_t number) {
    const std::lock_guard lock(mutex_);
    return ways_[way].posted >= int64_t(number);
  }
  // Of one lane of a communicator, in all directions: messages that wait for somebody.
  uint64_t waiting(int wanted) {
    const std::lock_guard lock(mutex_);
    uint64_t all = 0;
    for (const auto& [way, counts] : ways_) {
      const int64_t late = int64_t(counts.sent) - counts.posted;
      if (std::get<2>(way) == wanted && late > 0) all += uint64_t(late);
    }
    return all;
  }

 private:
  struct Counts {
    uint64_t sent = 0;
    int64_t posted = 0;
  };
  std::mutex mutex_;
  std::map<Way, Counts> ways_;
};

class Rendezvous : public Transport {
 public:
  static constexpr uint64_t kEager = 1000;  // bytes

  Rendezvous(std::shared_ptr<Transport> other, std::shared_ptr<Receipts> receipts, uint32_t rank)
      : Transport(other->greatest_tag, other->any_thread),
        other_(std::move(other)),
        receipts_(std::move(receipts)),
        rank_(int(rank)) {}

  void isend(const void* data, uint64_t nbytes, int dst, int tag, Request& req) override {
    const Receipts::Way way{rank_, dst, tag};
    const uint64_t number = receipts_->send(way);
    other_->isend(data, nbytes, dst, tag, req);
    const std::lock_guard lock(mutex_);
    if (nbytes > kEager) sends_[req] = {way, number};
  }
  void irecv(void* data, uint64_t least, uint64_t most, int src, int tag, Request& req) override {
    other_->irecv(data, least, most, src, tag, req);
    receipts_->receive({src, rank_, tag}, 1);
    const std::lock_guard lock(mutex_);
    receives_[req] = {src, rank_, tag};
  }
  bool test(Request& req) override {
    const std::lock_guard lock(mutex_);
    const auto send = sends_.find(req);
    const bool waits = send != sends_.end();
    if (waits && !receipts_->found(send->second.first, send->second.second)) return false;
    const Request asked = req;
    if (!other_->test(req)) return false;
    sends_.erase(asked);
    receives_.erase(asked);
    return true;
  }
  bool probe(int src, int tag) override { return other_->probe(src, tag); }
  void cancel(Request& req) override {
    const std::lock_guard lock(mutex_);
    const auto receive = receives_.find(req);
    if (receive != receives_.end()) receipts_->receive(receive->second, -1);
    other_->cancel(req);
  }

 private:
  std::shared_ptr<Transport> other_;
  std::shared_ptr<Receipts> receipts_;
  int rank_;
  std::mutex mutex_;
  std::map<Request, std::pair<Receipts::Way, uint64_t>> sends_;
  std::map<Request, Receipts::Way> receives_;
};

}  // namespace hosts
