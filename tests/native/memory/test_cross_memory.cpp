// Copies out of another process: of any size, to and from any place in a page.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "calls.h"
#include "engine/peer_memory.h"

namespace {

using namespace calls;
using pycoll::read_process;

constexpr size_t kPage = 4096, kMost = 200'000;

void every_place() {
  std::vector<char> theirs(kMost + 2 * kPage), here(theirs.size());
  for (size_t i = 0; i < theirs.size(); ++i) theirs[i] = static_cast<char>(i * 7 + i / 251 + 1);
  const auto on_a_page = [](std::vector<char>& bytes) {
    return bytes.data() + -reinterpret_cast<uintptr_t>(bytes.data()) % kPage;
  };
  for (size_t place : {0, 16, 4090}) {
    for (size_t behind : {0, 1, 16, 63, 64, 4095}) {
      for (size_t nbytes : {size_t{0}, size_t{1}, kPage - 1, kPage, size_t{64 << 10}, kMost - 1}) {
        const char* from = on_a_page(theirs) + place;
        char* to = on_a_page(here) + (place + behind) % kPage;
        std::fill(here.begin(), here.end(), 0);
        expect(read_process(getpid(), to, from, nbytes), "the kernel copies");
        expect(std::memcmp(to, from, nbytes) == 0, nbytes, " bytes from ", place, ", ", behind,
               " behind");
        expect(to[nbytes] == 0 && (to == here.data() || to[-1] == 0), "and nothing beside them");
      }
    }
  }
}

void no_memory() {
  char* pages = static_cast<char*>(
      mmap(nullptr, 64 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  munmap(pages + 32 * kPage, 32 * kPage);
  std::vector<char> here(64 * kPage);
  for (size_t place : {0, 16}) {
    char* to = here.data() + -reinterpret_cast<uintptr_t>(here.data()) % kPage + place;
    expect(!read_process(getpid(), to, pages, 40 * kPage) && errno == EFAULT, "from nowhere");
  }
  munmap(pages, 32 * kPage);
  expect(!read_process(1 << 30, here.data(), here.data(), 1) && errno == ESRCH, "nobody");
}

}  // namespace

int main() { return main_of({{"every place", every_place}, {"no memory", no_memory}}); }
