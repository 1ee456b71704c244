// What the message engine needs of MPI or of TCP connections: messages of bytes between two ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/wait.h"

namespace pycoll {

using Request = uint64_t;  // a message under way; 0: none

// How the connection to a rank was lost.
struct Loss {
  uint32_t order = 0;  // 1 for the first one that this transport lost; 0: it is not lost
  const char* kind = "PeerLost";
  std::string text{};
};

// Thread-safe. Messages of one rank with one tag arrive in the order in which they were sent. Every
// function throws TransportError, and PeerLost if a process of the job has died. As an alarm it
// wakes who waits for a message, if the system can; otherwise it sleeps for its slice.
class Transport : public Alarm {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{1} << 30;  // in one message

  // `any_thread`: calls may be made on several threads at the same time.
  Transport(int greatest_tag, bool any_thread)
      : greatest_tag(greatest_tag), any_thread(any_thread) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual void isend(const void* data, uint64_t nbytes, int dst, int tag, Request& request) = 0;
  // The message has `least` to `most` bytes; another one is an error of its sender.
  virtual void irecv(void* data, uint64_t least, uint64_t most, int src, int tag,
                     Request& request) = 0;
  // True once the request is done; it is then 0. Makes progress on all others too.
  virtual bool test(Request& request) = 0;
  // Whether a message with this tag has come from a rank, or begun to.
  virtual bool probe(int src, int tag) = 0;
  // Cancels a receive that has not been matched; the request must still be tested.
  virtual void cancel(Request& request) = 0;
  // Of a transport that notices by itself that ranks have died, whoever this rank waits for.
  virtual Loss loss(int) { return {}; }
  // Whether a rank has said that it sends nothing more, where it can say so.
  virtual bool left(int) { return false; }
  // Ends the connection to a rank that has sent what no rank sends; returns how it was lost.
  virtual Loss reject(int rank, const std::string& why) {
    return {0, "TransportError", "rank " + std::to_string(rank) + " has sent " + why};
  }
  // Whoever locks it makes several calls at less cost, and keeps other threads from making any.
  virtual bool try_lock() { return true; }
  virtual void lock() {}
  virtual void unlock() {}
  uint32_t losses() const { return losses_.load(std::memory_order_relaxed); }
  void sleep(uint32_t us) override { sleep_on(Bell{}, 0, us); }
  // Whether the program has shut the transport down: then nothing else may be called.
  virtual bool ended() const { return false; }

  const int greatest_tag;
  const bool any_thread;

 protected:
  std::atomic<uint32_t> losses_{0};
};

}  // namespace pycoll
