// The insides of the simulated machine, for its own files.
#pragma once

#include <ucontext.h>

#include "machine.h"

namespace simulation {

constexpr uint32_t kMost = 12;  // threads
constexpr uint32_t kOld = 6;    // stores of a place that are remembered
constexpr size_t kStackBytes = 512 << 10;
constexpr uint64_t kAccessNs = 20, kYieldNs = 20'000, kExitNs = 3'000'000, kPauseNs = 60'000;
constexpr uint64_t kSlowWakeNs = 400'000;  // a wake-up that comes later is none
constexpr uint32_t kMostStale = 3;         // loads in a row that may see old values
constexpr int kFirstPid = 1000;

using Clock = std::array<uint32_t, kMost>;

inline void join(Clock& to, const Clock& from) {
  for (uint32_t t = 0; t < kMost; ++t) to[t] = std::max(to[t], from[t]);
}

struct Store {
  uint64_t value = 0;
  uint32_t thread = kMost, epoch = 0;  // kMost: before all threads
  Clock released{};                    // what a load of it that acquires is ordered behind
};

struct Place {
  uint32_t threads = 0;                 // a bit for each that has come here
  std::array<Store, kOld> stores;       // the newest at (count - 1) % kOld
  uint64_t count = 0, last_strict = 0;  // one past the newest seq_cst store
  std::array<uint64_t, kMost> seen{};   // index of the newest store that a thread has seen
};

struct Access {
  uint32_t thread = kMost, epoch = 0, call = 0;
};

struct Cell {  // eight bytes of plain memory
  Access write;
  std::array<Access, kMost> reads;
};

struct Lock {
  uint32_t owner = kMost;
  bool owner_died = false;
  Clock released{};
};

struct Fiber {
  Thread* thread = nullptr;  // its process,
  uint32_t process = 0;      // and the number of that; the first thread of each has it, too
  std::function<void()> body;
  ucontext_t context{};
  char* stack = nullptr;
  Clock clock{}, pending{}, fenced{};
  bool over = false;
  uint64_t wake_ns = 0;  // 0: it can run
  const void* sleeps_on = nullptr;
  const void* blocked_on = nullptr;  // a lock, a condition, a set of connections
  bool woken = false;
  uint32_t stale = 0, call = 0;
  std::vector<bool> succeeded{true};  // by call; 0 is what lies between calls
  uint64_t eh[2] = {0, 0};            // exceptions that it handles
  std::vector<char> locals;           // its thread_local variables
};

enum class Touch { kRead, kWrite };

struct Race {
  Access now, before;
  Touch now_does, before_did;
  std::string text;
};

struct World {
  std::mt19937_64 random;
  uint64_t now_ns = 1'000'000'000, accesses = 0;
  double switches = 0.1, stales = 0.2, pauses = 0;
  bool sleepy = false, long_sleeps = false;
  std::vector<Fiber> fibers;
  std::vector<Thread>* processes = nullptr;
  uint32_t running = kMost;
  ucontext_t home{};

  std::unordered_map<uintptr_t, Place> places;
  std::unordered_map<uintptr_t, Cell> cells;
  std::unordered_map<const void*, Lock> locks;
  std::shared_ptr<void> descriptors;                     // of sockets.cpp
  std::unordered_map<const void*, uint64_t> changed_ns;  // when a word that is slept on changed
  std::vector<Race> races;
  std::string wrong;
  Options options;
};

extern World* world;  // null: no run is on

bool inside();   // of a thread of a run
Fiber& me();     // that thread
void point();    // time passes, and another thread may go on
void to_home();  // one does
void block(const void* on, uint64_t until_ns);
void unblock(const void* on, uint64_t from_ns = 0);  // all threads that block on it, then
Fiber& add_fiber(uint32_t process, std::function<void()> body);
void end_connections(uint32_t process);  // it has died
Place& place_of(const void* at, unsigned bytes);
void judge_races();                            // throws Wrong
uint64_t look(Place& place, Order order);      // what a load sees
uint64_t raw(const void* at, unsigned bytes);  // the newest value

}  // namespace simulation
