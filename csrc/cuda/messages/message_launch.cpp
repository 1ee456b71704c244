// Launches of messages.
#include <algorithm>

#include "cuda/host/group.h"
#include "cuda/messages/messages.h"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kBytesPerBlock = uint64_t{kMaxThreads} * 16 * 4;

uint64_t divided(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// What both sides know of a message.
MessageEnd end_of(const PycollCudaGroup& group, const PycollCudaMessage& message, int from,
                  int to) {
  const uint32_t n = group.world_size();
  COLL_CHECK(message.peer >= 0 && message.peer < int(n), "ArgumentError", "rank ", message.peer,
             " of ", n);
  MessageEnd end{};
  end.peer = static_cast<uint32_t>(message.peer);
  end.number = message.number;
  end.nbytes = message.nbytes;
  const uint64_t parts = message_parts(n, message.nbytes, message.slotted != 0);
  COLL_CHECK(parts < uint64_t{1} << 31, "TooLarge", message.nbytes, " bytes in one message");
  end.parts = static_cast<uint32_t>(parts);
  end.array = static_cast<char*>(message.array);
  if (message.slotted != 0) {
    end.part = message_slot(n);
    end.slots = group.control_of(to) + message_slots_offset(n, group.max_blocks()) +
                static_cast<uint64_t>(from) * kMessagePlaces * end.part;
  } else {
    end.part = divided(divided(message.nbytes, parts), 128) * 128;
  }
  return end;
}

// One for each part, where half of the device has room for as many: the other half is for what runs
// beside a message, such as a message the other way.
int default_blocks(const PycollCudaGroup& group, uint32_t parts, int resident) {
  const int fits = resident / (2 * static_cast<int>(group.ranks_on_device()));
  const uint32_t most = std::min({parts, kMessagePlaces, group.max_blocks()});
  return std::clamp(fits, 1, static_cast<int>(most));
}

}  // namespace

uint64_t message_parts(uint32_t n, uint64_t nbytes, bool slotted) {
  if (slotted) return std::max<uint64_t>(divided(nbytes, message_slot(n)), 1);
  return std::clamp<uint64_t>(divided(nbytes, kBytesPerBlock), 1, kMessagePlaces);
}

void launch_message(const PycollCudaGroup& group, const PycollCudaMessage& message, bool receives,
                    int nblocks, int nthreads, uint64_t timeout_ns, void* stream) {
  COLL_CHECK(!group.is_virtual(), "ArgumentError", "messages are for ranks of their own");
  const int threads = nthreads == 0 ? kMaxThreads : nthreads;
  COLL_CHECK(threads > 0 && threads <= kMaxThreads && threads % 32 == 0, "ArgumentError", nthreads,
             " threads per block; multiples of 32 up to ", kMaxThreads, " are possible");
  COLL_CHECK(!group.aborted(), "ArgumentError", "the group was aborted");
  const auto own = static_cast<int>(group.first_rank());
  MessageLaunch launch{};
  group.place(launch.call);
  launch.places = places_offset(group.world_size(), group.max_blocks());
  launch.end = end_of(group, message, receives ? message.peer : own, receives ? own : message.peer);
  launch.receives = receives;
  launch.posts = message.posts != 0;
  launch.awaits = message.awaits != 0;
  const bool slotted = message.slotted != 0;
  if (!slotted && receives) {
    launch.from = group.in_heap_of(message.peer, message.offset, message.nbytes);
  } else if (!slotted) {
    group.check_in_heap(message.array, message.nbytes, "sent");
  }
  const bool copies = receives || (slotted && launch.posts != 0);
  const int resident = machine::kernel_info(group.device(), kMessageKernel, threads).resident;
  const int blocks = nblocks != 0 ? nblocks
                     : copies     ? default_blocks(group, launch.end.parts, resident)
                                  : 1;
  COLL_CHECK(blocks > 0 && blocks <= int(group.max_blocks()), "ArgumentError", nblocks,
             " blocks; the group has room for ", group.max_blocks());
  COLL_CHECK(blocks <= resident, "TooLarge", blocks, " blocks; ", resident, " fit at once");
  launch.call.nblocks = static_cast<uint32_t>(copies ? blocks : 1);
  launch.call.timeout_ns = timeout_ns == 0 ? kDefaultTimeoutNs : timeout_ns;
  // Not cooperative: all blocks fit, and it is enough that each comes sooner or later. Nobody says
  // that cooperative launches on two streams run side by side.
  machine::launch(group.device(), kMessageKernel, static_cast<int>(launch.call.nblocks), threads,
                  &launch, sizeof(launch), false, stream);
}

bool is_taken(const PycollCudaGroup& group, const PycollCudaMessage& send) {
  COLL_CHECK(!group.is_virtual(), "ArgumentError", "messages are for ranks of their own");
  const auto own = static_cast<int>(group.first_rank());
  const MessageEnd end = end_of(group, send, own, send.peer);
  MessagePlace places[kMessagePlaces];
  const char* const at = group.control_of(own) +
                         places_offset(group.world_size(), group.max_blocks()) +
                         end.peer * sizeof(places);
  machine::copy_now(group.device(), places, at, sizeof(places));
  const uint64_t last = end.number + end.parts;
  for (uint64_t i = last - std::min(end.parts, kMessagePlaces); i < last; ++i) {
    const auto after = static_cast<uint32_t>(i / kMessagePlaces + 1);
    if (!reached(places[i % kMessagePlaces].taken, after)) return false;
  }
  return true;
}

}  // namespace pycoll::cuda
