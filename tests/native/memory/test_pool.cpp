// Blocks of symmetric memory: what is used again, and what is not.
#include "calls.h"
#include "memory/pool.h"

namespace {

long g_until_no_memory = -1;  // allocations until one fails; none does if negative

}  // namespace

void* operator new(size_t bytes) {
  if (g_until_no_memory >= 0 && g_until_no_memory-- == 0) throw std::bad_alloc();
  void* const found = std::malloc(bytes);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}

void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace {

using namespace calls;

constexpr uint64_t kRegion = 1 << 22;

std::unique_ptr<Heap> heap(uint64_t bytes = kRegion) {
  const int fd = memfd_create("test", MFD_ALLOW_SEALING);
  expect(fd >= 0, "no memfd");
  auto made = std::make_unique<Heap>(fd, 1, bytes);
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

// Destructors free blocks: they cannot be told that memory for a list is short.
void blocks_are_freed_without_memory() {
  constexpr uint64_t kMb = 1 << 20;
  constexpr uint64_t kSizes[] = {100, 40 * kMb, 5'000, 30 * kMb, 5'000, 100 * kMb, 40 * kMb};
  long failing = 0;
  bool failed = true;
  for (; failed; ++failing) {
    const auto memory = heap(512 * kMb);
    Pool& pool = memory->pool(0);
    std::vector<void*> blocks;
    for (const uint64_t nbytes : kSizes) blocks.push_back(pool.alloc(nbytes));
    g_until_no_memory = failing;
    for (const size_t i : {3, 1, 0, 6, 2, 5, 4}) pool.free(blocks[i]);
    failed = g_until_no_memory < 0;
    g_until_no_memory = -1;
    expect(pool.used_bytes() == 0, failing, ": freed bytes count as used");
    std::vector<std::pair<char*, uint64_t>> taken;
    for (const uint64_t nbytes : kSizes) {
      char* fresh = static_cast<char*>(pool.alloc(nbytes));
      for (const auto& [other, size] : taken) {
        expect(fresh + nbytes <= other || other + size <= fresh, failing, ": two blocks overlap");
      }
      taken.emplace_back(fresh, nbytes);
    }
  }
  expect(failing > 5, "only ", failing, " allocations were seen");
}

}  // namespace

int main() {
  return main_of({{"freed blocks come again", freed_blocks_come_again},
                  {"retired blocks do not", retired_blocks_do_not},
                  {"blocks are freed without memory", blocks_are_freed_without_memory}});
}
