// Locks that show that a process lives: held by one thread, marked when the process dies.
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <optional>
#include <thread>

#include "base/liveness.h"
#include "calls.h"
#include "engine/liveness_hold.h"

namespace {

using namespace calls;

constexpr size_t kLocks = 2500;  // more than the kernel looks at in one thread

size_t threads() {
  DIR* tasks = opendir("/proc/self/task");
  size_t entries = 0;
  while (readdir(tasks) != nullptr) ++entries;
  closedir(tasks);
  return entries - 2;
}

// Memory that a child shares.
pthread_mutex_t* shared_locks() {
  void* memory = mmap(nullptr, kLocks * sizeof(pthread_mutex_t), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  expect(memory != MAP_FAILED, "no memory");
  auto* locks = static_cast<pthread_mutex_t*>(memory);
  for (size_t i = 0; i < kLocks; ++i) init_liveness(&locks[i]);
  return locks;
}

bool all(const pthread_mutex_t* locks, bool (*how)(pthread_mutex_t*)) {
  return std::all_of(locks, locks + kLocks, [how](const pthread_mutex_t& lock) {
    return how(const_cast<pthread_mutex_t*>(&lock));
  });
}

void several_at_once() {
  const size_t before = threads();
  std::vector<std::thread> others;
  for (int t = 0; t < 4; ++t) {
    others.emplace_back([] {
      pthread_mutex_t locks[3];
      for (pthread_mutex_t& lock : locks) init_liveness(&lock);
      for (int round = 0; round < 300; ++round) {
        std::optional<LivenessHold> holds[3];
        for (int i = 0; i < 3; ++i) {
          holds[i].emplace(&locks[i]);
          expect(!is_unowned(&locks[i]) && !owner_died(&locks[i]), "a lock is not held");
        }
        holds[round % 3].reset();
        expect(is_unowned(&locks[round % 3]), "a lock was not released");
      }
      for (pthread_mutex_t& lock : locks) expect(is_unowned(&lock), "a lock is held for ever");
    });
  }
  for (std::thread& other : others) other.join();
  expect(threads() == before, "a thread is left");
}

void death_marks_all() {
  pthread_mutex_t* locks = shared_locks();
  const pid_t child = fork();
  if (child == 0) {
    const size_t before = threads();
    std::vector<std::unique_ptr<LivenessHold>> holds;
    for (size_t i = 0; i < kLocks; ++i) holds.push_back(std::make_unique<LivenessHold>(&locks[i]));
    if (threads() > before + 3) _exit(1);
    raise(SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFSIGNALED(status), "the child has started too many threads");
  expect(all(locks, owner_died), "the kernel has not marked all locks");
  munmap(locks, kLocks * sizeof(pthread_mutex_t));
}

// A child made by fork releases nothing of its parent, and can hold locks of its own.
void in_a_child() {
  pthread_mutex_t* locks = shared_locks();
  auto hold = std::make_unique<LivenessHold>(&locks[0]);
  const pid_t child = fork();
  if (child == 0) {
    hold.reset();
    const LivenessHold own(&locks[1]);
    _exit(is_unowned(&locks[0]) || is_unowned(&locks[1]));
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child had other locks");
  expect(!is_unowned(&locks[0]) && !owner_died(&locks[0]), "the child has released a lock");
  expect(owner_died(&locks[1]), "the end of the child is not marked");
  hold.reset();
  expect(is_unowned(&locks[0]), "the parent has not released its lock");
  munmap(locks, kLocks * sizeof(pthread_mutex_t));
}

}  // namespace

int main() {
  return main_of({{"several at once", several_at_once},
                  {"death marks all", death_marks_all},
                  {"in a child", in_a_child}});
}
