#include "memory/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/liveness.h"
#include "base/types.h"

namespace pycoll {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr uint64_t kBoardMagic = 0x31445242'4C4F4350;  // "PCOLBRD1"

struct BoardHeader {
  uint64_t magic;
  uint32_t abi, world_size, rank, links;
  uint64_t cookie;
  std::atomic<uint64_t> inside;
};

uint64_t bytes_of(uint32_t links) {
  const uint64_t all = kPage + sizeof(RankBlock) + uint64_t{links} * sizeof(Link);
  return (all + kPage - 1) / kPage * kPage;
}

}  // namespace

std::unique_ptr<Board> Board::make(uint64_t cookie, uint32_t world_size, uint32_t rank,
                                   uint32_t links) {
  std::unique_ptr<Board> board(new Board);
  board->fd_ = memfd_create("pycoll-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (board->fd_ < 0) return nullptr;
  const uint64_t bytes = bytes_of(links);
  fchmod(board->fd_, 0600);
  if (posix_fallocate(board->fd_, 0, static_cast<off_t>(bytes)) != 0) return nullptr;
  try {
    move_above_streams(board->fd_);
    board->map(board->fd_, bytes, true);
  } catch (const Error&) {
    return nullptr;
  }
  auto* header = reinterpret_cast<BoardHeader*>(board->base_);
  header->abi = kAbiVersion;
  header->world_size = world_size;
  header->rank = rank;
  header->links = links;
  header->cookie = cookie;
  RankBlock& block = board->block();
  block.pid.store(getpid(), kRelaxed);
  block.starttime.store(process_stat(getpid()).starttime, kRelaxed);
  block.waiting_peer.store(-1, kRelaxed);
  block.phase.store(uint32_t(Phase::kRun), std::memory_order_release);
  header->magic = kBoardMagic;
  seal_size(board->fd_);
  return board;
}

std::unique_ptr<const Board> Board::view(int fd) {
  alignas(BoardHeader) unsigned char page[sizeof(BoardHeader)];
  const auto& header = *reinterpret_cast<const BoardHeader*>(page);
  struct stat status{};
  const bool made = pread(fd, page, sizeof(page), 0) == sizeof(page);
  COLL_CHECK(made && header.magic == kBoardMagic, "TransportError", "there is no board of a rank");
  COLL_CHECK(header.abi == kAbiVersion, "TransportError", "the job has ABI ", header.abi,
             " where this is ", kAbiVersion, ": look at it with its own version of pycoll");
  const bool sealed = (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
  const bool fits = sealed && header.links <= kMaxWorldSize && fstat(fd, &status) == 0 &&
                    static_cast<uint64_t>(status.st_size) == bytes_of(header.links);
  COLL_CHECK(fits, "TransportError", "the board has another size than it says");
  std::unique_ptr<Board> board(new Board);
  board->map(fd, bytes_of(header.links), false);
  return board;
}

void Board::map(int fd, uint64_t bytes, bool writable) {
  const int rights = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* base = mmap(nullptr, bytes, rights, MAP_SHARED, fd, 0);
  COLL_CHECK(base != MAP_FAILED, "TransportError", "cannot map the board of a rank");
  base_ = static_cast<char*>(base);
  bytes_ = bytes;
  block_ = reinterpret_cast<RankBlock*>(base_ + kPage);
  links_ = reinterpret_cast<Link*>(base_ + kPage + sizeof(RankBlock));
}

Board::~Board() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

uint64_t Board::cookie() const { return reinterpret_cast<const BoardHeader*>(base_)->cookie; }
uint32_t Board::world_size() const {
  return reinterpret_cast<const BoardHeader*>(base_)->world_size;
}
uint32_t Board::rank() const { return reinterpret_cast<const BoardHeader*>(base_)->rank; }
uint32_t Board::links() const { return reinterpret_cast<const BoardHeader*>(base_)->links; }

uint64_t Board::inside() const {
  return reinterpret_cast<const BoardHeader*>(base_)->inside.load();
}
void Board::set_inside(uint64_t cookie) {
  reinterpret_cast<BoardHeader*>(base_)->inside.store(cookie);
}

void Board::begin_call(uint64_t iteration, uint64_t descriptor, uint64_t count, uint32_t site) {
  const uint64_t seq = block_->call_seq.load(kRelaxed) + 1;
  CallRecord& record = block_->records[seq % kRecords];
  record.iteration.store(iteration, kRelaxed);
  record.descriptor.store(descriptor, kRelaxed);
  record.count.store(count, kRelaxed);
  record.site.store(site, kRelaxed);
  record.done.store(0, kRelaxed);
  record.call_seq.store(seq, std::memory_order_release);
  block_->call_seq.store(seq, std::memory_order_release);
}

void Board::waits(int32_t peer, uint32_t step, uint64_t since_ns) {
  block_->waiting_position.store(step, kRelaxed);
  block_->waiting_since_ns.store(since_ns, kRelaxed);
  block_->waiting_peer.store(peer, std::memory_order_release);
}

void Board::end_call(bool done) {
  block_->waiting_peer.store(-1, std::memory_order_release);
  block_->records[block_->call_seq.load(kRelaxed) % kRecords].done.store(done ? 1 : 0, kRelaxed);
}

void Board::name_site(uint32_t id, std::string_view text) {
  if (id >= kSites) return;
  store_text(block_->site_text[id], kSiteBytes, text);
  block_->sites.store(id + 1, std::memory_order_release);
}

void Board::leave(Phase phase, std::string_view text) {
  if (block_->phase.load(kRelaxed) != uint32_t(Phase::kRun)) return;
  store_text(block_->leave_text, kTextBytes, text);
  block_->phase.store(uint32_t(phase), std::memory_order_release);
}

void MessageNote::waits(MessageWay way, int32_t peer, uint32_t tag) {
  if (shown_ || block_ == nullptr || block_->message_way.load(kRelaxed) != 0) return;
  shown_ = true;
  block_->message_peer.store(peer, kRelaxed);
  block_->message_tag.store(tag, kRelaxed);
  block_->message_since_ns.store(now_ns(), kRelaxed);
  block_->message_way.store(uint32_t(way), std::memory_order_release);
}

}  // namespace pycoll
