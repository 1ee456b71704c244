#include "memory/control.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/liveness.h"
#include "base/types.h"
#include "memory/reservation.h"

namespace pycoll {
namespace {

constexpr uint64_t kMagic = 0x31474553'4C4F4350;   // "PCOLSEG1"
constexpr uint64_t kAbsent = 0x31454E4F'474C4F50;  // "POLGONE1"

struct Header {
  std::atomic<uint64_t> magic;  // stored last
  uint32_t abi;
  Geometry geometry;
  uint64_t cookie;
};
static_assert(sizeof(Header) <= kPage);

// The whole file, in place of a segment, where a rank has declined before one was laid out.
struct Absence {
  uint64_t magic;  // kAbsent
  uint32_t rank;
  char text[kTextBytes];
};
static_assert(sizeof(Absence) < kPage);  // shorter than any segment

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Byte offsets of the parts of a segment.
struct Parts {
  uint64_t abort, election, reports, blocks, lines, sleepers, cells, mailboxes, end;

  explicit Parts(const Geometry& g) {
    const uint64_t n = g.world_size;
    abort = kPage;
    election = abort + sizeof(AbortBlock);
    reports = election + sizeof(Election);
    blocks = round_up(reports + n * sizeof(RankReport), kPage);
    lines = blocks + n * sizeof(RankBlock);
    sleepers = lines + 2 * n * sizeof(FlagLine);
    cells = round_up(sleepers + 2 * n * sizeof(SleeperCount), kPage);
    mailboxes = round_up(cells + 2 * n * g.cell_bytes, kPage);
    end = round_up(mailboxes + n * n * g.mailbox_bytes, kPage);
  }
};

Geometry checked(Geometry g) {
  constexpr uint64_t kMost = uint64_t{1} << 30;
  COLL_CHECK(g.world_size >= 1 && g.world_size <= kMaxWorldSize, "TransportError",
             "world_size must be 1..", kMaxWorldSize, ", got ", g.world_size);
  COLL_CHECK(g.cell_bytes >= 64 && g.cell_bytes <= kMost, "TransportError",
             "cell_bytes must be 64..", kMost, ", got ", g.cell_bytes);
  COLL_CHECK(g.mailbox_bytes <= kMost, "TransportError", "mailbox_bytes must be at most ", kMost,
             ", got ", g.mailbox_bytes);
  COLL_CHECK(g.start_iteration >= 2, "TransportError", "start_iteration must be at least 2, got ",
             g.start_iteration);
  g.cell_bytes = round_up(g.cell_bytes, 64);
  g.mailbox_bytes = round_up(g.mailbox_bytes, 64);
  return g;
}

// Excludes the other threads and processes that open the same file, until destruction or death. A
// file description of our own is what makes that work: an inherited one is shared with our parent.
class FileLock {
 public:
  FileLock(int fd, const Patience& patience) {
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    own_fd_ = ::open(path, O_RDWR | O_CLOEXEC);
    COLL_CHECK(own_fd_ >= 0, "TransportError", "cannot open ", path,
               " of the control segment: ", std::strerror(errno),
               "; pycoll needs a memfd and /proc");
    try {
      take(patience);
    } catch (...) {
      ::close(own_fd_);
      throw;
    }
  }
  ~FileLock() { ::close(own_fd_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  // Asks again and again: the holder may be stopped, and then the kernel would wait for ever.
  void take(const Patience& patience) {
    const uint64_t deadline = now_ns() + static_cast<uint64_t>(patience.timeout_s * 1e9);
    const auto taken = [this] {
      struct flock whole = {};
      whole.l_type = F_WRLCK;
      whole.l_whence = SEEK_SET;
      if (fcntl(own_fd_, F_OFD_SETLK, &whole) == 0) return true;
      COLL_CHECK(errno == EAGAIN || errno == EACCES || errno == EINTR, "TransportError",
                 "cannot lock the control segment: ", std::strerror(errno));
      return false;
    };
    const bool locked = wait_until(kPatient, Bell{}, taken, [&](Pulse pulse) {
      if (pulse == Pulse::kSlice && patience.check_signals != nullptr) {
        COLL_CHECK(!patience.check_signals(nullptr), "Interrupted", "start-up was interrupted");
      }
      return now_ns() >= deadline;
    });
    COLL_CHECK(locked, "CollTimeout", "start-up: another rank has not finished laying out the ",
               "control segment within ", patience.timeout_s, " s; its process may be stopped");
  }

  int own_fd_;
};

// A creator that was killed half way left a file without the magic. The lock is held.
bool is_made(int fd) {
  uint64_t magic = 0;
  return pread(fd, &magic, sizeof(magic), 0) == sizeof(magic) && magic == kMagic;
}

uint64_t file_bytes(int fd) {
  struct stat status;
  COLL_CHECK(fstat(fd, &status) == 0, "TransportError",
             "cannot stat the shared memory file: ", std::strerror(errno));
  return static_cast<uint64_t>(status.st_size);
}

bool read_absence(int fd, Absence& absence) {
  return file_bytes(fd) == sizeof(absence) &&
         pread(fd, &absence, sizeof(absence), 0) == sizeof(absence) && absence.magic == kAbsent;
}

// Whether no rank can lay out a segment any more; leaves the note if there is none. The lock is
// held, so a file without the magic is what a creator that was killed has left.
bool leave_absence(int fd, uint32_t rank, std::string_view text) {
  Absence absence{};
  if (is_made(fd)) return false;
  if (read_absence(fd, absence)) return true;
  if (ftruncate(fd, 0) != 0) return false;
  absence.rank = rank;
  store_text(absence.text, kTextBytes, text);
  absence.magic = kAbsent;
  if (pwrite(fd, &absence, sizeof(absence), 0) != sizeof(absence)) {  // a limit may cut it short
    return ftruncate(fd, 0) != 0;
  }
  seal_size(fd);
  return true;
}

}  // namespace

void seal_size(int fd) { fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL); }

void store_text(char* field, size_t field_bytes, std::string_view text) {
  const std::string_view end = text.size() < field_bytes ? "" : " [...]";
  size_t n = std::min(text.size(), field_bytes - 1 - end.size());
  if (!end.empty()) {
    while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
  }
  if (n > 0) std::memcpy(field, text.data(), n);  // an empty text may have no address
  std::memcpy(field + n, end.data(), end.size());
  field[n + end.size()] = '\0';
}

uint64_t ControlSegment::bytes(const Geometry& geometry) { return Parts(checked(geometry)).end; }

std::shared_ptr<ControlSegment> ControlSegment::open(int fd, const Geometry& geometry,
                                                     const Patience& patience) {
  const Geometry g = checked(geometry);
  std::shared_ptr<ControlSegment> segment(new ControlSegment);
  FileLock lock(fd, patience);
  const uint64_t want = Parts(g).end, have = file_bytes(fd);
  Absence absence;
  COLL_CHECK(!read_absence(fd, absence), "PeerLeft", "rank ", absence.rank,
             " cannot join this communicator: ", absence.text);
  if (have == 0) {
    COLL_CHECK((fcntl(fd, F_GET_SEALS) & F_SEAL_GROW) == 0, "PeerLeft",
               "another rank cannot join this communicator; its own error tells why");
    fchmod(fd, 0600);
    COLL_CHECK(ftruncate(fd, off_t(want)) == 0, "TransportError",
               "cannot size the control segment to ", want, " bytes: ", std::strerror(errno));
  }
  COLL_CHECK(have == 0 || have == want, "TransportError", "the control segment has ", have,
             " bytes where this rank expects ", want,
             ": the ranks disagree on world size, cell size or mailbox size");
  const bool made = is_made(fd);
  struct Undo {  // a creator that fails leaves the file empty, so that a later rank may try again
    int fd;
    bool armed;
    ~Undo() {
      if (armed && ftruncate(fd, 0) != 0) return;  // sealed: it had been made in full
    }
  } undo{fd, !made};
  if (!made) {
    reserve_pages(fd, 0, want, "TransportError",
                  "free memory, raise the memory limit of the container, or use smaller cells");
  }
  segment->map(fd, g);
  auto* header = reinterpret_cast<Header*>(segment->base_);
  if (!made) segment->initialise(fd);
  undo.armed = false;
  COLL_CHECK(header->abi == kAbiVersion, "TransportError", "the control segment has ABI ",
             header->abi, " where this rank has ", kAbiVersion,
             ": all ranks must use the same version of pycoll");
  const Geometry& other = header->geometry;
  COLL_CHECK(other == g, "TransportError", "ranks disagree on the communicator: world_size ",
             other.world_size, ", cell_bytes ", other.cell_bytes, ", mailbox_bytes ",
             other.mailbox_bytes, ", start_iteration ", other.start_iteration, " there; ",
             g.world_size, ", ", g.cell_bytes, ", ", g.mailbox_bytes, ", ", g.start_iteration,
             " on this rank");
  segment->cookie_ = header->cookie;
  segment->fd_ = copy_above_streams(fd);
  return segment;
}

std::shared_ptr<const ControlSegment> ControlSegment::view(int fd) {
  alignas(Header) unsigned char page[sizeof(Header)];
  const auto* header = reinterpret_cast<const Header*>(page);
  COLL_CHECK(is_made(fd) && pread(fd, page, sizeof(page), 0) == sizeof(page), "TransportError",
             "no control segment has been laid out there");
  COLL_CHECK(header->abi == kAbiVersion, "TransportError", "the job has ABI ", header->abi,
             " where this is ", kAbiVersion, ": look at it with its own version of pycoll");
  const Geometry g = checked(header->geometry);
  const bool sealed = (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
  COLL_CHECK(sealed && file_bytes(fd) == Parts(g).end, "TransportError",
             "the control segment has another size than it says");
  std::shared_ptr<ControlSegment> segment(new ControlSegment);
  segment->map(fd, g, false);
  segment->cookie_ = header->cookie;
  return segment;
}

void ControlSegment::map(int fd, const Geometry& geometry, bool writable) {
  const Parts parts(geometry);
  const int rights = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* base = mmap(nullptr, parts.end, rights, MAP_SHARED, fd, 0);
  COLL_CHECK(base != MAP_FAILED, "TransportError", "cannot map ", parts.end,
             " bytes of the control segment: ", std::strerror(errno));
  geometry_ = geometry;
  base_ = static_cast<char*>(base);
  bytes_ = parts.end;
  abort_ = reinterpret_cast<AbortBlock*>(base_ + parts.abort);
  election_ = reinterpret_cast<Election*>(base_ + parts.election);
  reports_ = reinterpret_cast<RankReport*>(base_ + parts.reports);
  blocks_ = reinterpret_cast<RankBlock*>(base_ + parts.blocks);
  lines_ = reinterpret_cast<FlagLine*>(base_ + parts.lines);
  sleepers_ = reinterpret_cast<SleeperCount*>(base_ + parts.sleepers);
  cells_ = base_ + parts.cells;
  mailboxes_ = base_ + parts.mailboxes;
}

void ControlSegment::initialise(int fd) {
  auto* header = reinterpret_cast<Header*>(base_);
  header->abi = kAbiVersion;
  header->geometry = geometry_;
  uint64_t cookie = 0;
  COLL_CHECK(getrandom(&cookie, sizeof(cookie), 0) == sizeof(cookie), "TransportError",
             "no random numbers: ", std::strerror(errno));
  header->cookie = cookie;
  init_liveness(&election_->lock);
  for (uint32_t rank = 0; rank < geometry_.world_size; ++rank) {
    RankBlock& own = block(rank);
    init_liveness(&own.liveness);
    own.waiting_peer.store(-1, std::memory_order_relaxed);
    // As if every rank had finished the two iterations before the first.
    for (uint64_t back = 1; back <= 2; ++back) {
      const uint64_t before = geometry_.start_iteration - back;
      const uint64_t position = position_of(before) | kDone;
      line(rank, before & 1).flag.store(position << 32, std::memory_order_relaxed);
    }
  }
  seal_size(fd);
  header->magic.store(kMagic, std::memory_order_release);
}

ControlSegment::~ControlSegment() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void ControlSegment::claim(uint32_t rank, int32_t pid) {
  COLL_CHECK(rank < geometry_.world_size, "TransportError", "rank ", rank, " is not in a world of ",
             geometry_.world_size);
  RankBlock& own = block(rank);
  if (pid == 0) pid = getpid();
  uint32_t free_slot = 0;
  COLL_CHECK(
      own.claimed.compare_exchange_strong(free_slot, 1), "TransportError", "rank ", rank,
      " of this communicator is taken by process ", own.pid.load(), "; this is process ", pid,
      ": give every rank another number, and let no child process of a rank call init before "
      "the rank does");
  own.pid.store(pid, std::memory_order_relaxed);
  own.tid.store(int32_t(syscall(SYS_gettid)), std::memory_order_relaxed);
  own.starttime.store(process_stat(pid).starttime, std::memory_order_relaxed);
  own.phase.store(uint32_t(Phase::kRun), std::memory_order_release);
}

void ControlSegment::decline(uint32_t rank, std::string_view text, int32_t pid) {
  claim(rank, pid);
  store_text(block(rank).leave_text, kTextBytes, text);
  block(rank).phase.store(uint32_t(Phase::kLeft), std::memory_order_release);
}

void ControlSegment::decline(int fd, uint32_t rank, std::string_view text, double timeout_s,
                             int32_t pid) {
  try {
    const FileLock lock(fd, {timeout_s});
    if (leave_absence(fd, rank, text)) return;
  } catch (const Error& error) {
    if (std::strcmp(error.kind(), "TransportError") != 0) throw;
    // Without /proc there is no lock, and so no note, just the seal.
  }
  fcntl(fd, F_ADD_SEALS, F_SEAL_GROW);  // fails if the file has been sealed for good: it is made
  const uint64_t deadline = now_ns() + static_cast<uint64_t>(timeout_s * 1e9);
  const auto given_up = [&](Pulse) { return file_bytes(fd) < kPage || now_ns() >= deadline; };
  if (!wait_until(kPatient, Bell{}, [&] { return is_made(fd); }, given_up)) return;
  alignas(Header) unsigned char page[sizeof(Header)];
  const auto* header = reinterpret_cast<const Header*>(page);
  if (pread(fd, page, sizeof(page), 0) != sizeof(page) || header->abi != kAbiVersion) return;
  ControlSegment segment;
  segment.map(fd, header->geometry);
  segment.decline(rank, text, pid);
}

bool ControlSegment::died_joining(uint32_t rank) {
  RankBlock& own = block(rank);
  const auto runs = [&] { return Phase(own.phase.load(std::memory_order_acquire)) == Phase::kRun; };
  return runs() && is_unowned(&own.liveness) &&
         process_over(own.pid.load(std::memory_order_relaxed),
                      own.starttime.load(std::memory_order_relaxed)) &&
         runs();  // a rank that closes stores its phase before it releases the lock
}

bool ControlSegment::deserted() {
  for (uint32_t rank = 0; rank < geometry_.world_size; ++rank) {
    const RankBlock& own = block(rank);
    const uint32_t phase = own.phase.load(std::memory_order_acquire);
    if (phase == uint32_t(Phase::kLeft) || phase == uint32_t(Phase::kClosed)) continue;
    const uint64_t born = own.starttime.load(std::memory_order_relaxed);
    if (phase == uint32_t(Phase::kAbsent) || process_stat(own.pid.load()).starttime == born) {
      return false;
    }
  }
  return true;
}

void ControlSegment::wake_everybody() {
  ring(report_bell());
  for (uint32_t rank = 0; rank < geometry_.world_size; ++rank) {
    ring(bell(rank, 0));
    ring(bell(rank, 1));
    ring(doorbell(rank));
  }
}

std::string ControlSegment::site_text(uint32_t rank, uint32_t site) const {
  const RankBlock& other = block(rank);
  if (site >= std::min(other.sites.load(std::memory_order_acquire), kSites)) return "";
  const char* text = other.site_text[site];
  return std::string(text, strnlen(text, kSiteBytes));
}

}  // namespace pycoll
