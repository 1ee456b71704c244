// Messages between hosts without MPI: one TCP connection for each pair of ranks.
//
// A message is a frame header of 16 bytes and its data. A thread reads and writes whatever can be
// read and written, so messages make progress while the rank computes. While somebody waits for a
// message, test() reads its connection instead: to wake the thread for it would take longer than
// the message does. The thread has it back when no test has come for a millisecond or two.
//
// A connection that ends without a goodbye is a rank that died. One that brings what no rank sends
// (see wire.h), or a message for which there is no memory, is ended. So is one whose other system
// no longer answers (silence.h): its host has no power or no network.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory/board.h"
#include "transports/messages/transport.h"

namespace pycoll {

class SocketApi : public Transport {
 public:
  static constexpr double kSilenceS = 30;

  // `sockets`: for each rank a connected stream socket, which now belongs to this object; -1 for
  // this rank. `names`: what error messages call each rank. `silence_s`: how long the system of
  // another rank may leave questions without an answer. Without `own_thread` nothing moves but in
  // serve_once(), and in test() what it waits for. Throws TransportError.
  SocketApi(std::vector<int> sockets, std::vector<std::string> names, double silence_s = kSilenceS,
            bool own_thread = true);
  ~SocketApi() override { close(); }

  // What is sent to a rank that has died is dropped. test() of a receive from it throws PeerLost,
  // unless a notice of that rank waits to be read, which says better what happened.
  void isend(const void* data, uint64_t nbytes, int dst, int tag, Request& req) override;
  void irecv(void* data, uint64_t least, uint64_t most, int src, int tag, Request& req) override;
  bool test(Request& req) override;
  bool probe(int src, int tag) override;
  void cancel(Request& req) override;
  Loss loss(int rank) override;
  bool left(int rank) override;
  Loss reject(int rank, const std::string& why) override;
  // Wakes when something has come, whoever reads it, and when the thread has moved something.
  void sleep(uint32_t us) override;

  // Says goodbye behind what is queued, and waits until the systems of the others have all of it:
  // what comes for a connection that is closed before makes the system here drop the rest. Gives up
  // when nothing has left for `patience_s`. Idempotent.
  void close(double patience_s = 1);
  // What is known of the connections; null if nobody can look.
  std::shared_ptr<const Board> board();
  // Reads and writes what can be, after waiting for that; false when this is closed.
  bool serve_once(int wait_ms);
  // For a child made by fork: gives up its copies of the sockets, of which nobody hears.
  void forget();

 private:
  static constexpr uint32_t kMagic = 0x70634D31;
  static constexpr int kGoodbye = -1;  // instead of a tag

  struct Frame {
    int32_t tag = 0;
    uint32_t magic = 0;
    uint64_t nbytes = 0;
  };
  struct Operation {
    int peer;
    bool receives;
    char* data = nullptr;
    uint64_t least = 0, most = 0;
    int tag = 0;
    bool done = false;
  };
  struct Outgoing {
    Frame frame;
    const char* data;
    uint64_t sent;  // of frame and data
    Operation* operation;
  };
  struct Message {  // has arrived, or begun to, before anybody asked for it
    std::unique_ptr<char[]> data;
    uint64_t nbytes;
    bool complete = false;
    Operation* taker = nullptr;
  };
  struct Peer {
    int socket = -1;
    std::string name;
    bool lost = false, said_goodbye = false;
    bool looked_at = false;      // test() reads it, not the thread
    uint32_t looks = 0;          // tests that found nothing, in a row or in this millisecond
    uint32_t watched = 0;        // events that the thread waits for
    uint32_t loss_order = 0;     // if lost without a goodbye
    bool silent = false;         // and without an end
    uint64_t refused_bytes = 0;  // of the message for which there was no memory
    std::string fault;           // why what it has sent cannot come from a rank
    std::deque<Outgoing> queue;
    std::unique_ptr<char[]> ahead;  // what has been read behind a frame
    uint64_t ahead_at = 0, ahead_end = 0;
    bool drained = false;            // the last read took all that had come
    Frame frame;                     // of the message that is being read
    uint64_t read = 0;               // of frame and data
    char* into = nullptr;            // where the data go
    Operation* operation = nullptr;  // whose they are, or
    Message* message = nullptr;      // nobody's yet
    std::unordered_map<int, std::deque<Operation*>> posted;
    std::unordered_map<int, std::deque<Message>> arrived;
  };

  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  void open(const std::vector<std::string>& names);
  void show_links();
  void receive(Peer& peer);
  bool receive_some(Peer& peer);
  int64_t read_from(Peer& peer, char* to, uint64_t wanted);
  void begin_message(Peer& peer);
  void end_message(Peer& peer);
  void send_queued(Peer& peer);
  void lose(Peer& peer, std::string_view fault = {});
  bool fits(Peer& peer, const Operation& operation, uint64_t nbytes);
  Loss describe_loss(const Peer& peer) const;
  void end_silent();
  void watch(Peer& peer);
  void look(Peer& peer);
  void end_look(Peer& peer);
  void end_looks();
  uint64_t unsent();
  bool notice_waits(const Peer& peer, int tag) const;

  std::mutex mutex_;  // of everything below
  std::vector<Peer> peers_;
  int epoll_ = -1, wake_ = -1;
  int moved_ = -1;     // tells those who sleep that the thread has moved something
  int arrivals_ = -1;  // what they wait for: `moved_`, and the connections
  bool closing_ = false, closed_ = false;
  std::shared_ptr<Board> board_;  // of the connections; null if nobody can look
  uint64_t shown_ns_ = 0;
  std::thread thread_;
  std::string own_name_;
  const double silence_s_;
  const int look_ms_;  // how often to look for systems that no longer answer
  uint64_t next_look_ns_ = 0, next_end_ns_ = 0;
  std::atomic<uint32_t> looked_at_{0};  // peers; the thread looks before it waits
  std::atomic<uint32_t> sleepers_{0};   // in sleep()
  const int pid_;                       // a child made by fork has no thread to join
};

}  // namespace pycoll
