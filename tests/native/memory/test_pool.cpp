// Blocks of symmetric memory: what is used again, and what is not.
#include "calls.h"
#include "memory/pool.h"

namespace {

using namespace calls;

constexpr uint64_t kRegion = 1 << 22;

std::unique_ptr<Heap> heap() {
  const int fd = memfd_create("test", MFD_ALLOW_SEALING);
  expect(fd >= 0, "no memfd");
  auto made = std::make_unique<Heap>(fd, 1, kRegion);
  close(fd);
  return made;
}

void freed_blocks_come_again() {
  const auto memory = heap();
  for (const uint64_t nbytes : {100, 5'000, 300'000}) {
    void* block = memory->pool(0).alloc(nbytes);
    memory->pool(0).free(block);
    expect(memory->pool(0).alloc(nbytes) == block, nbytes, " bytes are elsewhere");
  }
}

// A peer that was stopped in a call may write into what the call used, at any time.
void retired_blocks_do_not() {
  const auto memory = heap();
  Pool& pool = memory->pool(0);
  for (const uint64_t nbytes : {100, 5'000, 300'000}) {
    void* before = pool.alloc(nbytes);
    memory->retire_blocks();
    pool.free(before);
    void* after = pool.alloc(nbytes);
    expect(after != before, nbytes, " bytes are used again");
    pool.free(after);
    expect(pool.alloc(nbytes) == after, nbytes, " bytes taken later are not");
  }
  expect(pool.used_bytes() < kRegion / 2, "what was freed still counts as used");
}

}  // namespace

int main() {
  return main_of({{"freed blocks come again", freed_blocks_come_again},
                  {"retired blocks do not", retired_blocks_do_not}});
}
