// The control segment: the shared memory that the ranks of one communicator have in common.
//
// This folder has the memory that ranks share, and uses base/ only. heap.h is the symmetric heap,
// pool.h cuts blocks from it, registration.h moves existing arrays into it, reservation.h asks the
// system for pages. Read this file first.
//
// Order in memory: header, abort word and report, election, one block per rank, flag lines, sleeper
// counts, staging buffers ("cells"), mailboxes. Everything that more than one process touches is a
// lock-free std::atomic, or is plain memory that a release store on an atomic publishes. Times are
// CLOCK_MONOTONIC nanoseconds.
#pragma once

#include <pthread.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/wait.h"

namespace pycoll {

static_assert(std::endian::native == std::endian::little, "the flag word is split by address");
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline constexpr uint32_t kAbiVersion = 6;
inline constexpr uint32_t kMaxWorldSize = 4096;
inline constexpr size_t kPayloadBytes = 40;  // of a flag line
inline constexpr uint32_t kRecords = 64;     // calls remembered per rank
inline constexpr uint32_t kSites = 256;      // call sites interned per rank
inline constexpr size_t kSiteBytes = 128;
inline constexpr size_t kTextBytes = 256;  // reason of leaving, of an abort
inline constexpr size_t kRefusalBytes = 512;

// What every rank of a communicator must give alike.
struct Geometry {
  uint32_t world_size = 1;
  uint64_t cell_bytes = 64 << 10;  // one cell; rounded up to 64
  uint64_t mailbox_bytes = 0;      // one (src, dst) pair; rounded up to 64
  uint64_t start_iteration = 2;    // number of the first iteration, >= 2 (tests of the wrap)
  bool operator==(const Geometry&) const = default;
};

// How long a rank waits for another rank that lays out the segment.
struct Patience {
  double timeout_s = 300;
  bool (*check_signals)(void*) = nullptr;  // as EngineOptions has it
};

// In place of a peer: any of the other ranks, or no particular one.
constexpr int32_t kAnyRank = -1, kNoRank = -2;

enum class Phase : uint32_t { kAbsent = 0, kRun = 1, kLeft = 2, kClosed = 3 };

enum class MessageWay : uint32_t { kNone = 0, kSend = 1, kRecv = 2 };

enum class Cause : uint8_t {
  kNone = 0,
  kMismatch = 1,   // ranks called different things
  kLost = 2,       // the culprit's process died
  kLeft = 3,       // the culprit left by an exception, or closed while others waited for it
  kTimeout = 4,    // a deadline passed; the culprit is the rank that waits for nobody
  kInterrupt = 5,  // a signal handler raised on the culprit
  kAbort = 6,      // the culprit called abort
};

// The flag line of a rank for one parity of the iteration. `flag` is position:32 | fingerprint:32;
// position = (iteration mod 2^16) << 16 | step. Written by its owner only, `flag` last.
struct alignas(128) FlagLine {
  std::atomic<uint64_t> flag;
  std::atomic<uint64_t> descriptor;
  std::atomic<uint64_t> count;
  unsigned char payload[kPayloadBytes];  // a tiny staging buffer, or Payload of engine.cpp
};
static_assert(sizeof(FlagLine) == 128 && offsetof(FlagLine, payload) == 24);

// The position of step 0 of an iteration.
inline uint32_t position_of(uint64_t iteration) {
  return static_cast<uint32_t>(iteration & 0xFFFF) << 16;
}

// Whether the owner of a line has reached a position.
inline bool has_reached(const FlagLine& line, uint32_t position) {
  const uint64_t flag = line.flag.load(std::memory_order_acquire);
  return static_cast<int32_t>(static_cast<uint32_t>(flag >> 32) - position) >= 0;
}

struct alignas(128) SleeperCount {
  std::atomic<uint32_t> count;
};

struct alignas(64) CallRecord {
  std::atomic<uint64_t> call_seq;   // 1 for the first call of a rank
  std::atomic<uint64_t> iteration;  // first iteration of the call
  std::atomic<uint64_t> descriptor;
  std::atomic<uint64_t> count;
  std::atomic<uint32_t> site;
  std::atomic<uint32_t> done;  // 1 once the call returned without an error
};

// Of one parity. `origin` is the rank that refused; its own block of that parity holds the text.
struct Refusal {
  std::atomic<uint64_t> iteration;
  std::atomic<int32_t> origin;
  char text[kRefusalBytes];
};

// The state of a rank that its peers read. Written by that rank only.
struct alignas(4096) RankBlock {
  // Read by peers in every check of a wait.
  pthread_mutex_t liveness;     // robust; held by a thread of the rank's process while it lives
  std::atomic<uint32_t> phase;  // Phase
  std::atomic<uint32_t> claimed;
  std::atomic<int32_t> pid;
  std::atomic<int32_t> tid;
  std::atomic<uint64_t> starttime;  // field 22 of /proc/pid/stat: shows a reused pid
  std::atomic<uint64_t> word_at;    // address in that process; see PeerMemory
  // Progress. The waiting fields are set only when a wait takes long.
  alignas(128) std::atomic<uint64_t> call_seq;  // the newest record
  std::atomic<uint64_t> inside;                 // first iteration of its direct call, or 0
  std::atomic<int32_t> waiting_peer;            // -1: waits for nobody
  std::atomic<uint32_t> waiting_position;       // (iteration mod 2^16) << 16 | step
  std::atomic<uint64_t> waiting_since_ns;
  // A wait in send or recv, likewise only where it takes long; `message_way` is stored last.
  std::atomic<uint32_t> message_way;  // MessageWay
  std::atomic<int32_t> message_peer;  // or kAnyRank
  std::atomic<uint32_t> message_tag;
  std::atomic<uint32_t> queued;  // calls in the background that have not begun
  std::atomic<uint64_t> message_since_ns;
  // For waits on "any of many" (tagged messages): peers add 1 and wake.
  alignas(128) std::atomic<uint32_t> doorbell;
  alignas(128) std::atomic<uint32_t> doorbell_sleepers;
  alignas(128) char leave_text[kTextBytes];  // published by phase
  Refusal refusal[2];                        // published by the kFailed flag of that parity
  CallRecord records[kRecords];              // call_seq mod kRecords
  // Who is left, see Survivors: the newest round that each of these is true of.
  alignas(128) std::atomic<uint64_t> came;  // to which the rank has come, with its `offer`
  std::atomic<uint64_t> counted;            // that counts it; written by the rank that decides
  std::atomic<uint64_t> joined;             // whose communicator it has joined
  std::atomic<int32_t> offer;               // descriptor of memory for that
  std::atomic<uint32_t> sites;              // published entries of site_text
  char site_text[kSites][kSiteBytes];
};

// One rank in the snapshot that the first rank to notice a failure takes.
struct RankReport {
  uint32_t phase;   // Phase
  uint8_t alive;    // 0: its liveness lock says that the process died
  char state;       // of /proc/pid/stat (R, S, T, D, Z); '?' when not known
  uint8_t entered;  // 1: descriptor and count are those of the failed iteration
  int32_t pid;
  uint64_t flag[2];              // both flag words, by parity
  uint64_t call_seq, iteration;  // of the call that the next fields describe
  uint64_t descriptor, count;
  int32_t waiting_peer;  // -1: none
  uint32_t waiting_step;
  uint64_t waiting_ns;
  char site[kSiteBytes];
  char text[kTextBytes];  // why it left, or what it refused in this iteration
};

struct AbortWord {
  Cause cause = Cause::kNone;
  uint16_t culprit = 0, reporter = 0;
  uint16_t iteration = 0;  // mod 2^16
  uint64_t pack() const {
    return uint64_t{1} << 63 | uint64_t(cause) << 48 | uint64_t{culprit} << 32 |
           uint64_t{reporter} << 16 | iteration;
  }
  static AbortWord unpack(uint64_t word) {
    return {Cause(word >> 48 & 0xFF), uint16_t(word >> 32), uint16_t(word >> 16), uint16_t(word)};
  }
};

struct AbortBlock {
  alignas(128) std::atomic<uint64_t> word;   // 0, or AbortWord::pack by compare-and-swap
  alignas(128) std::atomic<uint32_t> ready;  // 1: text and the RankReports may be read
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> taken_over;  // rank + 1 of the one that writes the report of a dead one
  uint64_t iteration;
  char text[kTextBytes];
};

// Deciding the rounds of Survivors.
struct alignas(128) Election {
  pthread_mutex_t lock;           // robust
  std::atomic<uint64_t> decided;  // the newest round that is; stored under the lock, last
};

// Maps the segment. Thread-safe; shared by all engines of a process that use the same segment
// (ranks that are threads must share one object).
class ControlSegment {
 public:
  // Maps `fd` (a memfd; kept open by the caller or not, as it likes). The first process to come
  // sizes, allocates, seals and initialises it; the others check that they were given the same
  // geometry. Throws TransportError: no memory, another geometry or ABI, no /proc; CollTimeout: the
  // rank that lays it out takes longer than that; PeerLeft: another rank cannot join.
  static std::shared_ptr<ControlSegment> open(int fd, const Geometry& geometry,
                                              const Patience& patience = {});
  // For a process that cannot, or on behalf of one that is over: declines, see below, if the
  // segment has been laid out, whatever its geometry; otherwise nobody can lay it out any more, and
  // a rank that tries gets the reason. Throws CollTimeout: another rank lays it out right now, and
  // takes longer than that; TransportError: the rank has taken its slot before. `pid` is the
  // process of the rank; 0 is the calling one.
  static void decline(int fd, uint32_t rank, std::string_view text, double timeout_s, int32_t pid);
  // Maps the segment of other processes for reading only; nothing of it can be written through the
  // result. Throws TransportError if there is none, or one of another version.
  static std::shared_ptr<const ControlSegment> view(int fd);
  ~ControlSegment();
  ControlSegment(const ControlSegment&) = delete;
  ControlSegment& operator=(const ControlSegment&) = delete;

  // Bytes of a segment of that geometry.
  static uint64_t bytes(const Geometry& geometry);

  // Takes the slot of `rank` for a process, 0 is the calling one. Throws TransportError if it is
  // taken.
  void claim(uint32_t rank, int32_t pid = 0);
  // The same for a process that cannot join: its peers raise PeerLeft with the text.
  void decline(uint32_t rank, std::string_view text, int32_t pid = 0);
  // Whether the process that took the slot was over before its helper held the liveness lock, which
  // therefore does not show it.
  bool died_joining(uint32_t rank);

  const Geometry& geometry() const { return geometry_; }
  uint64_t cookie() const { return cookie_; }  // random, alike on all ranks
  bool deserted();                             // every rank has left, closed or died

  FlagLine& line(uint32_t rank, uint32_t parity) { return lines_[2 * rank + parity]; }
  char* cell(uint32_t rank, uint32_t parity) {
    return cells_ + (2 * uint64_t{rank} + parity) * geometry_.cell_bytes;
  }
  RankBlock& block(uint32_t rank) { return blocks_[rank]; }
  AbortBlock& abort_block() { return *abort_; }
  const FlagLine& line(uint32_t rank, uint32_t parity) const { return lines_[2 * rank + parity]; }
  const RankBlock& block(uint32_t rank) const { return blocks_[rank]; }
  const AbortBlock& abort_block() const { return *abort_; }
  Election& election() { return *election_; }
  RankReport& report(uint32_t rank) { return reports_[rank]; }
  char* mailbox(uint32_t src, uint32_t dst) {
    return mailboxes_ + (uint64_t{src} * geometry_.world_size + dst) * geometry_.mailbox_bytes;
  }

  // What to sleep on until `line(rank, parity)` changes.
  Bell bell(uint32_t rank, uint32_t parity) {
    return {reinterpret_cast<const char*>(&line(rank, parity).flag) + 4,
            &sleepers_[2 * rank + parity].count};
  }
  Bell report_bell() { return {&abort_->ready, &abort_->sleepers}; }
  Bell doorbell(uint32_t rank) {
    return {&blocks_[rank].doorbell, &blocks_[rank].doorbell_sleepers};
  }

  // Wakes every rank that sleeps on a flag line, a report or a doorbell.
  void wake_everybody();

  // Text of a call site of any rank; "" for an unknown id.
  std::string site_text(uint32_t rank, uint32_t site) const;

 private:
  ControlSegment() = default;
  void map(int fd, const Geometry& geometry, bool writable = true);
  void initialise(int fd);

  Geometry geometry_;
  uint64_t cookie_ = 0;
  int fd_ = -1;  // by which others of this user find the memory in /proc; -1 if there was none left
  char* base_ = nullptr;
  uint64_t bytes_ = 0;
  AbortBlock* abort_ = nullptr;
  Election* election_ = nullptr;
  RankReport* reports_ = nullptr;
  RankBlock* blocks_ = nullptr;
  FlagLine* lines_ = nullptr;
  SleeperCount* sleepers_ = nullptr;
  char* cells_ = nullptr;
  char* mailboxes_ = nullptr;
};

// Forbids to resize the file from now on; no effect on a file that cannot be sealed.
void seal_size(int fd);

// Copies text into a fixed field, zero-terminated: one that does not fit is cut at a UTF-8 boundary
// and ends in " [...]"; as `cut` of pycoll/errors.py.
void store_text(char* field, size_t field_bytes, std::string_view text);

}  // namespace pycoll
