// A machine that runs a few threads in one, switched where a seed says, at every atomic access.
//
// Its memory is that of C++20: a load may see any store that the order of things does not forbid,
// so an acquire or release that is missing shows as an old value, or as a race. Time is simulated,
// too: it passes with every access, and jumps to the next event when all threads sleep.
//
// The model, and where it is narrower than the standard: stores become visible in the order of
// execution (no load sees a store that has yet to come), and of plain memory only the order is
// checked, its values are always the newest.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

namespace simulation {

struct Machine;

// What is wrong with a run: the simulation ends.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A process, which may start threads of its own.
struct Thread {
  uint64_t kill_at = UINT64_MAX;    // dies before its so-many-th access
  uint64_t freeze_at = UINT64_MAX;  // stops for good there, and is not dead
  std::function<void()> body;
  // After the run:
  bool finished = false, dead = false;
  uint64_t died_ns = 0;   // when it died or froze
  uint64_t accesses = 0;  // that it made
};

struct Options {
  uint64_t seed = 0;
  uint64_t limit_ns = 20'000'000'000;
  uint64_t most_accesses = 3'000'000;
  std::vector<std::pair<const void*, size_t>> shared;  // plain memory in which races are looked for
  bool long_sleeps = false;     // nothing has to be noticed without a wake-up
  std::function<void()> begin;  // makes what is of the run, before its threads
};

// Runs the threads to their ends. Throws Wrong: a hang, a lost wake-up, a race in a call that has
// succeeded.
void run(std::vector<Thread>& threads, const Options& options);

uint64_t random();   // of the run's seed; for the bodies of threads
uint64_t now();      // simulated nanoseconds
uint32_t current();  // number of the running process

// Calls of a thread, to tell whether what it read in a race counted.
void begin_call();
void end_call(bool succeeded);
// Plain accesses of the running thread.
void note_read(const void* at, size_t nbytes);
void note_write(const void* at, size_t nbytes);
void pause();  // another thread may go on

// The lines of the source, so far, with an access that orders others, where threads have met; those
// that are sequentially consistent also with " acq_rel" behind.
std::vector<std::string> ordered_places();
// From now on accesses there are relaxed, or acquire and release only; "": none.
void weaken(const std::string& place);

}  // namespace simulation
