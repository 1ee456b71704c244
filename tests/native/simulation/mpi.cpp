#include "mpi.h"

#include "base/error.h"
#include "sockets.h"
#include "state.h"

#undef memcpy

namespace simulation {

struct Operation {
  bool receives;
  int peer;
  int tag;
  char* data;
  uint64_t nbytes;
  bool done = false;
  uint64_t done_ns = 0;
  Clock clock{};  // of who has done it
};

struct Letter {
  uint64_t arrives_ns, nbytes;
  const char* data;  // of the sender, or
  std::string copy{};
  Operation* sent = nullptr;  // that waits for it
  Clock clock{};
};

struct Mails {
  uint64_t eager_bytes, notice_ns;
  std::map<std::array<int, 3>, std::deque<Letter>> letters;  // by receiver, sender, tag
  std::map<std::pair<int, int>, uint64_t> last_ns;           // by receiver and sender
};

std::shared_ptr<Mails> make_mails() {
  auto made = std::make_shared<Mails>();
  made->eager_bytes = 16u << world->random() % 10;
  made->notice_ns = world->random() % 5'000'000;
  return made;
}

namespace {

class Mpi : public pycoll::Transport {
 public:
  Mpi(std::shared_ptr<Mails> mails, uint32_t rank)
      : Transport(INT32_MAX, false), mails_(std::move(mails)), rank_(int(rank)) {}

  void isend(const void* data, uint64_t nbytes, int dst, int tag,
             pycoll::Request& request) override {
    point();
    const auto* from = static_cast<const char*>(data);
    auto* operation = new Operation{false, dst, tag, nullptr, nbytes};
    request = reinterpret_cast<pycoll::Request>(operation);
    std::deque<Letter>& queue = mails_->letters[{dst, rank_, tag}];
    ++me().clock[world->running];
    Letter& letter = queue.emplace_back(Letter{arrival(dst), nbytes, from});
    letter.clock = me().clock;
    if (nbytes > mails_->eager_bytes) {
      letter.sent = operation;
      return;
    }
    note_read(data, nbytes);
    letter.copy.assign(from, nbytes);
    finish(*operation, world->now_ns);
  }

  void irecv(void* data, uint64_t, uint64_t most, int src, int tag,
             pycoll::Request& request) override {
    point();
    auto* operation = new Operation{true, src, tag, static_cast<char*>(data), most};
    request = reinterpret_cast<pycoll::Request>(operation);
    posted_.push_back(operation);
  }

  bool test(pycoll::Request& request) override {
    point();
    if (request == 0) return true;
    deliver();
    auto* operation = reinterpret_cast<Operation*>(request);
    if (operation->done && world->now_ns >= operation->done_ns) {
      join(me().clock, operation->clock);
      delete operation;
      request = 0;
      return true;
    }
    if (!operation->done) check(operation->peer);
    return false;
  }

  bool probe(int src, int tag) override {
    point();
    const auto found = mails_->letters.find({rank_, src, tag});
    if (found != mails_->letters.end() && !found->second.empty() &&
        found->second.front().arrives_ns <= world->now_ns) {
      return true;
    }
    check(src);
    return false;
  }

  void cancel(pycoll::Request& request) override {
    point();
    auto* operation = reinterpret_cast<Operation*>(request);
    if (request != 0 && std::erase(posted_, operation) > 0) operation->done = true;
  }

 private:
  // When what leaves now arrives at a rank: libraries keep the order of a pair.
  uint64_t arrival(int dst) {
    uint64_t& last_ns = mails_->last_ns[{dst, rank_}];
    return last_ns = std::max(last_ns, world->now_ns + delay_ns());
  }

  static void finish(Operation& operation, uint64_t at_ns) {
    operation.done = true;
    operation.done_ns = at_ns;
    ++me().clock[world->running];
    operation.clock = me().clock;
  }

  bool dead(int rank) const { return (*world->processes)[size_t(rank)].dead; }

  void check(int rank) const {
    const Thread& peer = (*world->processes)[size_t(rank)];
    if (peer.dead && world->now_ns >= peer.died_ns + mails_->notice_ns) {
      pycoll::throw_error("PeerLost", "MPI says that a process of the job died");
    }
  }

  // Messages of one rank with one tag find receives in the order in which these were posted.
  void deliver() {
    std::set<std::array<int, 3>> late;
    std::erase_if(posted_, [&](Operation* to) {
      const std::array<int, 3> key{rank_, to->peer, to->tag};
      std::deque<Letter>& queue = mails_->letters[key];
      if (queue.empty() || queue.front().arrives_ns > world->now_ns) late.insert(key);
      if (late.count(key) != 0) return false;
      Letter& letter = queue.front();
      if (letter.sent != nullptr && dead(to->peer)) return false;  // its memory is gone
      if (letter.nbytes > to->nbytes) pycoll::throw_error("TransportError", "message truncated");
      join(me().clock, letter.clock);
      const char* from = letter.sent != nullptr ? letter.data : letter.copy.data();
      note_read(from, letter.nbytes);
      note_write(to->data, letter.nbytes);
      std::memcpy(to->data, from, letter.nbytes);
      if (letter.sent != nullptr) finish(*letter.sent, arrival(to->peer));
      finish(*to, world->now_ns);
      queue.pop_front();
      return true;
    });
  }

  std::shared_ptr<Mails> mails_;
  const int rank_;
  std::vector<Operation*> posted_;
};

}  // namespace

std::shared_ptr<pycoll::Transport> join_mpi(std::shared_ptr<Mails> mails, uint32_t rank) {
  return std::make_shared<Mpi>(std::move(mails), rank);
}

}  // namespace simulation
