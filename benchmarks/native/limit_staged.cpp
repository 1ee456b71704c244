// The limits of ordinary arrays: collectives of two ranks by hand, which can reach each other's
// arrays through shared memory or through the kernel only, and do nothing else.
// Driven by benchmarks/limits.py.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "by_hand.h"

namespace {

constexpr size_t kCell = 1 << 20;

struct Pair : Ranks {
  // Every rank has four: two of each kind.
  char* cell(size_t of, size_t kind, size_t parity) const {
    return bytes() + (4 * of + 2 * kind + parity) * (kCell + kGap);
  }
  char* mine(size_t kind, size_t parity) const { return cell(rank, kind, parity); }
  char* peers(size_t kind, size_t parity) const { return cell(1 - rank, kind, parity); }
};

void fold(float* own, const float* other, float* result, size_t count) {
  for (size_t i = 0; i < count; ++i) result[i] = own[i] = own[i] + other[i];
}

}  // namespace

extern "C" size_t shared_bytes(size_t ranks) { return 4 * ranks * (kCell + kGap); }

// In place, two shots, segment by segment (`segment` <= 2 MiB): in one step a rank copies a piece
// of the peer's half in, folds the piece before it, and copies the result of the one before that
// out.
extern "C" void staged_all_reduce(Pair pair, char* x, size_t nbytes, size_t segment) {
  const size_t half = nbytes / 2, piece = std::min(segment, nbytes) / 2;
  const size_t pieces = half / piece;
  char* own = x + pair.rank * half;
  char* others = x + (1 - pair.rank) * half;
  for (size_t i = 0; i < pieces + 2; ++i) {
    pair.wait();
    const size_t now = i % 2, before = 1 - now;
    if (i < pieces) std::memcpy(pair.mine(0, now), others + i * piece, piece);
    if (i >= 1 && i <= pieces) {
      fold(reinterpret_cast<float*>(own + (i - 1) * piece),
           reinterpret_cast<const float*>(pair.peers(0, before)),
           reinterpret_cast<float*>(pair.mine(1, before)), piece / sizeof(float));
    }
    if (i >= 2) std::memcpy(others + (i - 2) * piece, pair.peers(1, now), piece);
    pair.step();
  }
}

// What a collective that only moves data does: `send` goes through the cells to the peer's
// `receive`, and `own_from` to `own_to`, as many bytes; null: this rank does not. One piece goes in
// while the peer copies the one before it out.
extern "C" void staged_move(Pair pair, char* own_to, const char* own_from, const char* send,
                            char* receive, size_t nbytes, size_t segment) {
  const size_t piece = std::min(segment, nbytes);
  for (size_t i = 0; i < nbytes / piece + 1; ++i) {
    pair.wait();
    const size_t now = i % 2;
    if (i < nbytes / piece) {
      if (send != nullptr) std::memcpy(pair.mine(0, now), send + i * piece, piece);
      if (own_to != nullptr) std::memcpy(own_to + i * piece, own_from + i * piece, piece);
    }
    if (i >= 1 && receive != nullptr) {
      std::memcpy(receive + (i - 1) * piece, pair.peers(0, 1 - now), piece);
    }
    pair.step();
  }
}

// The same, but the kernel copies once, out of the peer's array (`there`, in process `pid`).
// Returns false if it must not.
extern "C" int read_move(Pair pair, char* own_to, const char* own_from, char* receive,
                         size_t nbytes, size_t pid, char* there) {
  pair.meet();
  bool done = true;
  if (receive != nullptr) {
    const iovec to{receive, nbytes}, from{there, nbytes};
    const ssize_t read = process_vm_readv(static_cast<pid_t>(pid), &to, 1, &from, 1, 0);
    done = read == static_cast<ssize_t>(nbytes);
  }
  if (own_to != nullptr) std::memcpy(own_to, own_from, nbytes);
  pair.meet();
  return done;
}

// Rank 1 copies its array in, piece by piece, and rank 0 folds each with its own into the result.
extern "C" void staged_reduce(Pair pair, const char* x, char* out, size_t nbytes, size_t segment) {
  const size_t piece = std::min(segment, nbytes);
  for (size_t i = 0; i < nbytes / piece + 1; ++i) {
    pair.wait();
    const size_t now = i % 2;
    if (i < nbytes / piece && pair.rank == 1) std::memcpy(pair.mine(0, now), x + i * piece, piece);
    if (i >= 1 && pair.rank == 0) {
      const size_t at = (i - 1) * piece;
      const auto* own = reinterpret_cast<const float*>(x + at);
      const auto* other = reinterpret_cast<const float*>(pair.peers(0, 1 - now));
      auto* result = reinterpret_cast<float*>(out + at);
      for (size_t k = 0; k < piece / sizeof(float); ++k) result[k] = own[k] + other[k];
    }
    pair.step();
  }
}

// What every all-reduce in place does at least: each rank reads and writes the whole of its array.
extern "C" void touch(Pair pair, float* x, size_t nbytes) {
  pair.meet();
  for (size_t i = 0; i < nbytes / sizeof(float); ++i) x[i] += 1;
}
