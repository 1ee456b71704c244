// Races in plain memory that ranks share: two accesses, one of them a store, that nothing orders.
#include "state.h"

#undef memcpy

namespace simulation {
namespace {

bool ordered(const Access& access) {
  return access.thread == kMost || access.thread == world->running ||
         access.epoch <= me().clock[access.thread];
}

void note_race(const Access& now, Touch now_does, const Access& before, Touch before_did) {
  if (world->races.size() >= 256) return;
  const char* names[] = {"reads", "writes"};
  char text[160];
  std::snprintf(text, sizeof(text), "thread %u %s what thread %u %s, not in order", now.thread,
                names[int(now_does)], before.thread, names[int(before_did)]);
  world->races.push_back({now, before, now_does, before_did, text});
}

void look_for_races(Cell& cell, Touch touch, const Access& now) {
  if (!ordered(cell.write)) note_race(now, touch, cell.write, Touch::kWrite);
  if (touch == Touch::kRead) {
    cell.reads[world->running] = now;
    return;
  }
  for (const Access& read : cell.reads) {
    if (!ordered(read)) note_race(now, touch, read, Touch::kRead);
  }
  cell.write = now;
  cell.reads = {};
}

// Other memory is a rank's own, and may be freed by one and taken by the next.
bool is_shared(const void* at) {
  for (const auto& [base, nbytes] : world->options.shared) {
    if (static_cast<const char*>(at) - static_cast<const char*>(base) < ptrdiff_t(nbytes) &&
        at >= base) {
      return true;
    }
  }
  return false;
}

void note(const void* at, size_t nbytes, Touch touch, uint32_t call) {
  if (!inside() || nbytes == 0 || !is_shared(at)) return;
  const Access now{world->running, me().clock[world->running] + 1, call};
  const auto last = (reinterpret_cast<uintptr_t>(at) + nbytes - 1) / 8;
  for (auto i = reinterpret_cast<uintptr_t>(at) / 8; i <= last; ++i) {
    look_for_races(world->cells[i], touch, now);
  }
}

}  // namespace

// What a call has read in a race counts for nothing if the call has failed; but nobody may touch
// what belongs to the caller.
void judge_races() {
  const auto counts = [](const Access& access, Touch touch) {
    const bool succeeded = world->fibers[access.thread].succeeded[access.call];
    return access.call == 0 || succeeded || touch == Touch::kWrite;
  };
  for (const Race& race : world->races) {
    if (counts(race.now, race.now_does) && counts(race.before, race.before_did)) {
      throw Wrong("a race: " + race.text);
    }
  }
}

void* copy_memory(void* to, const void* from, size_t nbytes) {
  note(from, nbytes, Touch::kRead, 0);
  note(to, nbytes, Touch::kWrite, 0);
  return std::memcpy(to, from, nbytes);
}

void note_read(const void* at, size_t nbytes) { note(at, nbytes, Touch::kRead, me().call); }
void note_write(const void* at, size_t nbytes) { note(at, nbytes, Touch::kWrite, me().call); }

void begin_call() {
  me().call = uint32_t(me().succeeded.size());
  me().succeeded.push_back(false);
}
void end_call(bool succeeded) {
  me().succeeded[me().call] = succeeded;
  me().call = 0;
}

}  // namespace simulation
