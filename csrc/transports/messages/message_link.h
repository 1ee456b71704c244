// The messages of one communicator over MPI: packets with a head, and bare data.
//
// All communicators of a job use one duplicated MPI communicator. A *context* number tells them
// apart: it is part of every tag, together with the *lane*. Packets go through buffers of our own,
// so they refer to nobody's arrays; whoever finds a packet of a call that is over drops it. Bare
// data goes straight between arrays, once all ranks are known to be in the same call.
#pragma once

#include <memory>
#include <vector>

#include "base/fork_guard.h"
#include "base/wait.h"
#include "transports/mpi/mpi_api.h"

namespace pycoll {

inline constexpr uint64_t kPacketBytes = 32 << 10;  // of data behind one head, at most

// What a tag is about.
enum class Lane : int {
  kPacket = 0,   // data of a call whose messages are small
  kControl = 1,  // notices: refusals, failures, leaving
  kAgree = 2,    // agreement that all ranks are in the same call
  kMail = 3,     // tagged messages of users
  kBulkMail = 4,
  kWindow = 8,  // bare data of the segments in flight: kWindows for each call in flight
};
inline constexpr int kLanes = 16;
inline constexpr uint32_t kWindows = 4;
inline constexpr uint32_t kTrain = 2;  // calls that one rank has in flight
static_assert(static_cast<int>(Lane::kWindow) + kTrain * kWindows <= kLanes);

// In front of every packet: which call of which rank it belongs to, and what that call is.
struct Head {
  uint64_t seq = 0;  // number of the call
  uint64_t descriptor = 0, count = 0;
  uint16_t src = 0;     // as in plans
  uint16_t check = 0;   // half of the binding's
  uint32_t nbytes = 0;  // of data that follow
};
static_assert(sizeof(Head) == 32);

// Not thread-safe: one thread at a time, as the engine sees to.
class MpiLink {
 public:
  // `members`: rank in `comm` of each rank of this communicator.
  MpiLink(std::shared_ptr<MpiApi> api, MpiHandle comm, std::vector<int> members, uint32_t rank,
          uint32_t context);
  // Takes back what was posted and never matched.
  ~MpiLink();
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return static_cast<uint32_t>(members_.size()); }

  // Room for the data of a packet, then send it. One packet at a time.
  char* open_packet();
  void send_packet(Lane lane, uint32_t peer, const Head& head);

  // The oldest packet of a peer that has arrived and was not dropped, or null.
  const Head* packet(Lane lane, uint32_t peer);
  // Likewise of any rank; for one lane, kMail. Receives are posted rank by rank: some MPIs let
  // those from any source wait for ever where shared memory and a network are both in use.
  const Head* packet_of_any();
  static const char* data(const Head* head) { return reinterpret_cast<const char*>(head + 1); }
  // Lets go of what packet() or packet_of_any() returned.
  void drop(const Head* head);

  // Whether the packets of a call have left our buffers: then the call may end, and peers get them
  // even if this rank does not come back to MPI for long. What else has been sent may wait for
  // somebody to receive it, which MPI shows where it is large: packets of a call that a rank has
  // refused, and messages of users. A notice may wait for a rank that is not inside MPI. A call
  // must wait for none of these; they are in buffers of our own, and do no harm there.
  bool flushed(uint64_t seq);
  // Whether all notices have left, and, if asked, all messages of users.
  bool told(bool mail);
  // Drops what has arrived of calls before this one, which somebody has refused. A rank that takes
  // packets only later keeps the buffers of those who sent them until then.
  void drop_before(uint64_t seq);

  void isend(const void* data, uint64_t nbytes, uint32_t peer, int lane, MpiRequest& req);
  void irecv(void* data, uint64_t nbytes, uint32_t peer, int lane, MpiRequest& req);
  bool test(MpiRequest& req) { return api_->test(req); }
  // Takes back receives; gives up on those that a peer has begun to fill, and on all of them in a
  // child made by fork. Those are left in `receives`: their memory must stay.
  void withdraw(std::vector<MpiRequest>& receives);

  // A notice to one rank; at most kNoticeBytes. Sent in the background, see flushed().
  void send_notice(uint32_t peer, const void* data, uint64_t nbytes);
  // Looks at so many ranks in turn, and takes one notice that has arrived; `data` gets its first
  // nbytes. False if there is none. A look costs as much as a test of a message.
  bool take_notice(void* data, uint64_t nbytes, uint32_t looks);

  // A rank that MPI knows to be dead, or -1. Throws nothing.
  int32_t find_dead();

  static constexpr uint64_t kNoticeBytes = 8 << 10;

 private:
  struct Inbox {  // one receive that is posted, or has completed
    std::unique_ptr<char[]> buffer;
    MpiRequest request = 0;
    bool posted = false, complete = false;
  };
  struct Parcel {
    std::unique_ptr<char[]> buffer;
    uint64_t capacity = 0;
    MpiRequest request = 0;
    Lane lane = Lane::kControl;
    uint64_t seq = 0;  // of the call that a packet belongs to
    bool busy = false;
  };
  const Head* poll(Inbox& inbox, uint32_t peer, Lane lane);
  int tag(int lane) const { return static_cast<int>(context_) * kLanes + lane; }
  Parcel& parcel(uint64_t capacity, bool notice = false);
  bool left(Parcel& parcel);
  template <typename F>
  bool all_left(F&& matters);

  std::shared_ptr<MpiApi> api_;
  MpiHandle comm_;
  ForkGuard fork_guard_;
  std::vector<int> members_;
  uint32_t rank_, context_;
  std::vector<Inbox> packets_, agreements_, mails_;  // by peer
  std::vector<Parcel> parcels_;
  size_t open_ = 0;  // of parcels_
  Inbox notice_;
  uint32_t next_ = 0;  // rank to look at next
};

}  // namespace pycoll
