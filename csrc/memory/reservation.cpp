#include "memory/reservation.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/wait.h"

namespace pycoll {
namespace {

// How a version of control groups calls what we read.
struct Version {
  const char *limit, *usage;
  const char* caches[2];  // rows of memory.stat: pages that the kernel can drop
};
constexpr Version kVersions[] = {
    {"memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file", "total_active_file"}},
    {"memory.max", "memory.current", {"inactive_file", "active_file"}},
};

// The value of the row that begins with `name`.
std::optional<uint64_t> row_of(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word, rest;
  while (file >> word) {
    uint64_t value;
    if (word == name && file >> value) return value;
    file.clear();
    std::getline(file, rest);
  }
  return {};
}

// The number that is a file's whole text: none for "max", too.
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value;
  if (file >> value) return value;
  return {};
}

// What the limit of one group leaves; UINT64_MAX without one.
uint64_t left_in(const std::string& directory, const Version& version) {
  const auto limit = number_in(directory + "/" + version.limit);
  const auto usage = number_in(directory + "/" + version.usage);
  if (!limit || !usage) return UINT64_MAX;
  uint64_t caches = 0;
  for (const char* row : version.caches)
    caches += row_of(directory + "/memory.stat", row).value_or(0);
  const uint64_t used = *usage - std::min(*usage, caches);
  return *limit - std::min(*limit, used);
}

// Where this process is in a hierarchy: the groups' path, by /proc/self/cgroup.
std::optional<std::string> own_group(const std::string& root, bool unified) {
  std::ifstream file(root + "/proc/self/cgroup");  // number:controllers:path
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (unified ? names == ",," : names.find(",memory,") != std::string::npos) {
      return line.substr(second + 1);
    }
  }
  return {};
}

// Where a hierarchy can be read: the directory, and the path of the group that lies there.
struct Mount {
  std::string directory, group;
};

std::optional<Mount> mount_of(const std::string& root, bool unified) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string id, parent, device, group, directory, word, type, source, options;
    words >> id >> parent >> device >> group >> directory;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> options;
    const bool memory = ("," + options + ",").find(",memory,") != std::string::npos;
    if (unified ? type == "cgroup2" : type == "cgroup" && memory) return Mount{directory, group};
  }
  return {};
}

uint64_t left_by_groups(const std::string& root, bool unified) {
  const auto mount = mount_of(root, unified);
  auto path = own_group(root, unified);
  if (!mount || !path) return UINT64_MAX;
  // Below the group that is mounted; a container may not see more than its own.
  if (mount->group != "/") {
    const bool below = path->rfind(mount->group + "/", 0) == 0;
    *path = below ? path->substr(mount->group.size()) : "";
  }
  if (*path == "/") path->clear();
  uint64_t left = UINT64_MAX;
  for (;; path->resize(path->rfind('/'))) {
    left = std::min(left, left_in(root + mount->directory + *path, kVersions[unified]));
    if (path->find('/') == std::string::npos) return left;
  }
}

// Returns the number of the error, or 0.
int allocate(int fd, uint64_t offset, uint64_t nbytes) {
  while (fallocate(fd, 0, off_t(offset), off_t(nbytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace

uint64_t available_memory(const std::string& root) {
  const auto kilobytes = row_of(root + "/proc/meminfo", "MemAvailable:");
  const uint64_t machine = kilobytes ? *kilobytes * 1024 : UINT64_MAX;
  return std::min({machine, left_by_groups(root, false), left_by_groups(root, true)});
}

// Small reservations that need not ask what is available, since one has just asked: reading the
// kernel's files takes a hundred times as long as they do. No lock: a child made by fork could find
// it taken for good.
class Allowance {
 public:
  bool covers(uint64_t nbytes) {
    if (now_ns() > end_.load()) return false;
    uint64_t left = left_.load();
    while (left >= nbytes) {
      if (left_.compare_exchange_weak(left, left - nbytes)) return true;
    }
    return false;
  }

  // Renews it where `available` bytes were found.
  void renew(uint64_t available) {
    left_ = std::min(kMost, available / kShare);
    end_ = now_ns() + kValidNs;
  }

 private:
  static constexpr uint64_t kMost = 16 << 20, kShare = 256, kValidNs = 20'000'000;
  std::atomic<uint64_t> left_{0}, end_{0};
};

// The kernel would rather kill any process than refuse pages of a memfd. So pages are taken in
// parts, after a look before each at how many there are: other ranks reserve at the same moment.
void reserve_pages(int fd, uint64_t offset, uint64_t nbytes, const char* kind, const char* fix) {
  constexpr uint64_t kPart = 64 << 20, kSpare = 512 << 20;
  static Allowance allowance;
  for (uint64_t done = 0; done < nbytes;) {
    const uint64_t part = std::min(kPart, nbytes - done);
    const bool covered = allowance.covers(nbytes);
    const uint64_t available = covered ? UINT64_MAX : available_memory();
    const bool fits = nbytes - done + std::min(kSpare, nbytes) <= available;
    if (!covered && fits) allowance.renew(available);
    const int error = fits ? allocate(fd, offset + done, part) : ENOMEM;
    done += part;
    if (error == 0) continue;
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(done));
    COLL_CHECK(fits, kind, "cannot reserve ", nbytes, " bytes of shared memory: ", available,
               " bytes are available, some of them left to others; ", fix);
    throw_error(kind, "cannot reserve ", nbytes, " bytes of shared memory: ", std::strerror(error),
                "; ", fix);
  }
}

}  // namespace pycoll
