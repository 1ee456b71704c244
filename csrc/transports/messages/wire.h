// What goes over the wire: lanes, the header of eager messages, notices; and the one place that
// checks whether what has arrived can come from a rank.
#pragma once

#include <cstdint>

#include "memory/control.h"

namespace pycoll {

inline constexpr uint64_t kEagerBytes = 32 << 10;  // of data behind one header, at most

// What a tag is about.
enum class Lane : int {
  kEager = 0,        // data of a call whose messages are small
  kNotice = 1,       // refusals, failures, leaving
  kAgreement = 2,    // agreement that all ranks are in the same call
  kMail = 3,         // tagged messages of users
  kMailPayload = 4,  // of those that are larger than kEagerBytes
  kPayload = 8,      // of the segments in flight: kWindows for each call in flight
};
inline constexpr int kLanes = 16;
inline constexpr uint32_t kWindows = 4;
inline constexpr uint32_t kBatch = 2;  // calls that one rank has in flight
static_assert(static_cast<int>(Lane::kPayload) + kBatch * kWindows == kLanes);

// In front of every eager message: which call it belongs to, and what that call is. On Lane::kMail:
// descriptor is tag:32 | type:32, count the bytes of the message; a large one follows as payload.
struct EagerHeader {
  uint64_t seq = 0;  // number of the call
  uint64_t descriptor = 0, count = 0;
  uint32_t check = 0;   // the binding's, mixed with calls before that are not proven
  uint32_t nbytes = 0;  // of data that follow
  const char* data() const { return reinterpret_cast<const char*>(this + 1); }
};
static_assert(sizeof(EagerHeader) == 32);

// What a rank sends to all others when a communicator fails, or when it refuses or leaves.
struct Notice {
  enum Kind : uint32_t {
    kRecord = 1,    // the communicator fails
    kLeft = 2,      // by an exception
    kClosed = 3,    // in order
    kRefused = 4,   // its arguments of call `seq`
    kRaise = 5,     // every rank raises the error `name`
    kQuestion = 6,  // it waits for the receiver, which compares calls
    kPast = 7,      // call `seq`, which it has left early; before what it says next
  };
  uint32_t kind = 0, src = 0;
  uint64_t seq = 0;    // of the call it is in, or of the next
  uint32_t cause = 0;  // Cause, if this rank has noticed one; kNone otherwise
  uint32_t culprit = 0;
  uint32_t in_call = 0;  // 1: it has entered call `seq`
  int32_t waiting_peer = -1;
  uint32_t waiting_step = 0;
  uint64_t waiting_ns = 0;
  uint64_t descriptor = 0, count = 0, check = 0;
  char site[kSiteBytes] = "";
  char name[32] = "";       // kRaise: kind of the error
  char text[6 << 10] = "";  // reason; last, since only what is used is sent
};

// Why no rank sends a message of so many bytes with this tag, or null. To be asked before anything
// is allocated for it.
const char* wrong_size(int tag, uint64_t nbytes);
// Why no rank sends this, or null. The size has passed wrong_size().
const char* wrong_content(int tag, const char* data, uint64_t nbytes);
// Why no rank of a communicator of so many sends this notice, or null.
const char* wrong_ranks(const Notice& notice, uint32_t world_size);

}  // namespace pycoll
