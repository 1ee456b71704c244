#include "transports/messages/wire.h"

#include <cstddef>
#include <cstring>

#include "transports/messages/transport.h"

namespace pycoll {
namespace {

constexpr uint64_t kNoticeHead = offsetof(Notice, text);
constexpr uint64_t kMostMail = uint64_t{1} << 47;  // of one message: what one process can map

Lane lane_of(int tag) {
  const int lane = tag % kLanes;
  return lane >= static_cast<int>(Lane::kPayload) ? Lane::kPayload : static_cast<Lane>(lane);
}

template <size_t n>
bool terminated(const char (&text)[n]) {
  return std::memchr(text, '\0', n) != nullptr;
}

const char* wrong_notice(const char* data, uint64_t nbytes) {
  Notice notice;
  std::memcpy(&notice, data, nbytes);
  if (notice.kind < Notice::kRecord || notice.kind > Notice::kPast) return "a notice of no kind";
  if (notice.cause > static_cast<uint32_t>(Cause::kAbort)) return "a notice of no cause";
  if (notice.in_call > 1 || notice.waiting_peer < -1) return "a notice of no state";
  const bool ends = terminated(notice.site) && terminated(notice.name) && data[nbytes - 1] == '\0';
  return ends ? nullptr : "a notice whose text does not end";
}

}  // namespace

const char* wrong_size(int tag, uint64_t nbytes) {
  if (tag < 0) return "a negative tag";
  uint64_t least = 0, most = Transport::kMostBytes;
  switch (lane_of(tag)) {
    case Lane::kEager:
    case Lane::kMail:
      least = sizeof(EagerHeader);
      most = least + kEagerBytes;
      break;
    case Lane::kAgreement:
      least = most = sizeof(EagerHeader);
      break;
    case Lane::kNotice:
      least = kNoticeHead + 1;
      most = sizeof(Notice);
      break;
    case Lane::kMailPayload:
      least = 1;
      break;
    case Lane::kPayload:
      break;
    default:
      return "a tag of no lane";
  }
  return nbytes < least || nbytes > most ? "a size that no message of its lane has" : nullptr;
}

const char* wrong_content(int tag, const char* data, uint64_t nbytes) {
  const Lane lane = lane_of(tag);
  if (lane == Lane::kNotice) return wrong_notice(data, nbytes);
  if (lane == Lane::kMailPayload || lane == Lane::kPayload) return nullptr;
  EagerHeader header;
  std::memcpy(&header, data, sizeof(header));
  if (header.nbytes != nbytes - sizeof(header)) return "a header with another size";
  if (lane != Lane::kMail) return header.seq == 0 ? "a header of no call" : nullptr;
  if (header.seq != 0 || header.check != 0) return "a message with the number of a call";
  if (header.count > kMostMail) return "a message larger than any memory";
  const bool eager = header.count <= kEagerBytes;
  return header.nbytes == (eager ? header.count : 0) ? nullptr : "a message with another size";
}

const char* wrong_ranks(const Notice& notice, uint32_t world_size) {
  const bool known =
      notice.culprit < world_size && notice.waiting_peer < static_cast<int64_t>(world_size);
  return known ? nullptr : "a notice about a rank that does not exist";
}

}  // namespace pycoll
