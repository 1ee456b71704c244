#include "callers.h"

namespace players {

void judge_calls(Event event, uint32_t culprit, const std::vector<const Caller*>& callers,
                 const std::vector<Thread>& processes, const Allowed& allowed, uint64_t told_ns,
                 bool names) {
  uint64_t last_gone_ns = 0;
  for (const Thread& t : processes) {
    if (!t.finished) last_gone_ns = std::max(last_gone_ns, t.died_ns);
  }
  for (const Caller* c : callers) {
    for (uint32_t call = 0; call < c->ended.size(); ++call) {
      const Ended& end = c->ended[call];
      const bool over = processes[c->rank].finished || call + 1 < c->ended.size();
      if (!over) continue;
      // One that closes while others are in the call after its last error is heard of as left.
      const bool late = end.kind == "PeerLeft" && event != Event::kNone;
      if (!end.kind.empty() && !late && !allowed.at(event).count(end.kind)) {
        wrong("rank ", c->rank, ", call ", call, ", event ", int(event), " of rank ", culprit, ": ",
              end.kind, ": ", end.text);
      }
      const uint64_t knowable_ns = std::max(end.entered_ns, last_gone_ns);
      if (end.kind == "PeerLost" && end.returned_ns > knowable_ns + told_ns) {
        wrong("rank ", c->rank, " hears of a death after ", (end.returned_ns - knowable_ns) / 1000,
              " us");
      }
      const std::string dead = "rank " + std::to_string(culprit) + ' ';
      if (names && end.kind == "PeerLost" && event == Event::kDeath &&
          !end.text.starts_with(dead)) {
        wrong("rank ", c->rank, " hears that another rank than ", culprit, " died: ", end.text);
      }
      if (!end.kind.empty() || !end.collective || c->rejected_itself) continue;
      for (const Caller* other : callers) {  // nobody returns before all have entered
        if (other->ended.size() <= call || other->ended[call].entered_ns > end.returned_ns) {
          wrong("rank ", c->rank, " returns from call ", call, " before rank ", other->rank,
                " enters");
        }
      }
    }
  }
}

}  // namespace players
