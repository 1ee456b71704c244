// Locks, conditions, threads and processes of the simulated machine.
#include "state.h"

#undef memcpy

namespace simulation {

void block(const void* on, uint64_t until_ns) {
  Fiber& fiber = me();
  fiber.blocked_on = on;
  fiber.wake_ns = until_ns;
  to_home();
  fiber.blocked_on = nullptr;
  fiber.wake_ns = 0;
}

void unblock(const void* on, uint64_t from_ns) {
  for (Fiber& fiber : world->fibers) {
    if (fiber.blocked_on == on) fiber.wake_ns = std::min(fiber.wake_ns, from_ns);
  }
}

void pause() { point(); }

void yield() {
  if (!inside()) return;
  point();
  block(nullptr, world->now_ns + kYieldNs);
}

int try_lock(const void* address) {
  if (!inside()) return 0;
  point();
  Lock& lock = world->locks[address];
  if (lock.owner != kMost) return EBUSY;
  lock.owner = world->running;
  join(me().clock, lock.released);
  return std::exchange(lock.owner_died, false) ? EOWNERDEAD : 0;
}

int lock(const void* address) {
  int result = try_lock(address);
  while (result == EBUSY) {
    block(address, UINT64_MAX);
    result = try_lock(address);
  }
  return result;
}

static void release(const void* address) {
  Lock& lock = world->locks[address];
  if (lock.owner == kMost) return;
  lock.owner = kMost;
  ++me().clock[world->running];
  lock.released = me().clock;
  unblock(address);
}

int unlock(const void* address) {
  if (!inside()) return 0;
  point();
  release(address);
  return 0;
}

void wait_for_notice(const void* condition, const void* address, uint64_t until_ns) {
  release(address);
  block(condition, until_ns);
  lock(address);
}

void notify(const void* condition) {
  point();
  unblock(condition);
}

unsigned long thread_id() { return inside() ? world->running + 1ul : kMost + 1ul; }

uint32_t start_thread(std::function<void()> body) {
  point();
  const auto thread = uint32_t(world->fibers.size());
  Fiber& fiber = add_fiber(me().process, std::move(body));
  ++me().clock[world->running];
  fiber.clock = me().clock;
  fiber.clock[thread] = 1;
  return thread;
}

void join_thread(uint32_t thread) {
  point();
  Fiber& fiber = world->fibers[thread];
  while (!fiber.over) block(&fiber, UINT64_MAX);
  join(me().clock, fiber.clock);
}

void sleep_ns(uint64_t ns) {
  point();
  block(nullptr, world->now_ns + ns);
}

int process_id() { return inside() ? kFirstPid + int(me().process) : kFirstPid - 1; }

ssize_t read_process(int pid, const iovec* to, const iovec* from) {
  point();
  const uint32_t process = uint32_t(pid - kFirstPid);
  if (process >= world->processes->size() || (*world->processes)[process].dead) {
    errno = ESRCH;
    return -1;
  }
  note_read(from->iov_base, from->iov_len);
  note_write(to->iov_base, from->iov_len);
  std::memcpy(to->iov_base, from->iov_base, from->iov_len);
  return ssize_t(from->iov_len);
}

}  // namespace simulation
