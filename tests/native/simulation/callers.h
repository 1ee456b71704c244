// What all simulated jobs share: what goes wrong, how calls end, and whether they may end so.
#pragma once

#include "base/error.h"
#include "machine.h"

namespace players {

using namespace pycoll;
using simulation::Thread;
using simulation::Wrong;

constexpr double kTimeout = 2;

// A silence is a connection over which nothing passes any more; a cut one ends.
enum class Event {
  kNone,
  kDeath,
  kTwoDeaths,
  kFreeze,
  kRefusal,
  kMismatch,
  kAbort,
  kLeave,
  kCut,
  kSilence,
  kRefusalAndAbort,  // the latter of another rank
  kLeaveAndAbort
};

// How a call of a rank ended.
struct Ended {
  std::string kind, text;  // of its error
  uint64_t entered_ns = 0, returned_ns = 0;
  bool collective = true;
};

template <typename... Parts>
[[noreturn]] void wrong(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Wrong(text.str());
}

struct Caller {
  uint32_t rank;
  std::vector<Ended> ended;
  bool rejected_itself = false;
};

using Allowed = std::map<Event, std::set<std::string>>;

// Throws Wrong if a call has ended as none may. Survivors hear of a death within `told_ns`, and, if
// `names`, who has died.
void judge_calls(Event event, uint32_t culprit, const std::vector<const Caller*>& callers,
                 const std::vector<Thread>& processes, const Allowed& allowed, uint64_t told_ns,
                 bool names);

}  // namespace players
