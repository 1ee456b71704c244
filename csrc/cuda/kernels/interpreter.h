// Runs the plan of a rank: any program of FOLD, SIGNAL and WAIT.
#pragma once

#include "cuda/kernels/signals.h"

namespace pycoll::cuda {

// What a kernel folds with: F has range<kBytes>, kSize is the size of its elements in bytes.
template <typename F, int kSizeOfElement>
struct With {
  using Fold = F;
  static constexpr int kSize = kSizeOfElement;
};

inline constexpr uint64_t kUnbounded = ~uint64_t{0};

// Finds the addresses of pieces and folds this block's slice of them.
template <typename P>
class Pieces {
 public:
  PYCOLL_DEVICE explicit Pieces(Member<P>& member)
      : m_(member), a_(member.launch()), p_(member.p()) {
    begin_segment();
  }

  PYCOLL_DEVICE void begin_segment() {
    start_ = m_.segment() * a_.shape.segment;
    reach_ = a_.shape.largest - start_;
    if (reach_ > a_.shape.segment) reach_ = a_.shape.segment;
  }

  // By one thread: makes piece k of an operand entry `t` of the block's table; sources come first.
  PYCOLL_DEVICE void place(const Operand& operand, uint32_t k, uint32_t t, uint32_t nsrc) {
    Shared& s = p_.shared();
    uint64_t extent = 0;
    char* const at = resolve(operand, k, extent);
    s.extent[t] = extent;
    if (t < nsrc) {
      s.src[t] = at;
    } else {
      s.dst[t - nsrc] = at;
    }
  }

  // Chunk k of an instruction: every thread places some operands, then all fold.
  template <typename W>
  PYCOLL_DEVICE void fold(const Instr& instr, const Operand* operands, uint32_t k) {
    p_.barrier();  // what was folded before is in place, and nobody reads the table any more
    const uint32_t all = uint32_t{instr.nsrc} + instr.ndst;
    for (uint32_t t = p_.tid(); t < all; t += p_.threads()) {
      place(instr.flags & kDivide ? p_.shared().piece : operands[t], k, t, instr.nsrc);
    }
    p_.barrier();
    const bool complete = (instr.flags & kFoldComplete) != 0 && a_.shape.scale_at_exit == 0;
    const bool divides = complete || (instr.flags & kDivide) != 0;
    const FoldView view{p_.shared().src,
                        p_.shared().dst,
                        instr.nsrc,
                        instr.ndst,
                        (instr.flags & kFoldTree) != 0,
                        {divides ? a_.shape.scale_n : 0, a_.shape.is_signed != 0}};
    run<W>(view, [&](uint64_t begin, uint64_t end) {
      W::Fold::template range<16>(p_, view, begin, end);
    });
  }

  // Folds this block's slice of what the table holds.
  template <typename W, typename Packs>
  PYCOLL_DEVICE void run(const FoldView& view, Packs packs) const {
    uint64_t length = reach_;
    for (uint32_t t = 0; t < view.nsrc + view.ndst; ++t) {
      const uint64_t extent = p_.shared().extent[t];
      if (extent < length) length = extent;
    }
    const uint64_t begin = m_.block() * a_.slice;
    const uint64_t end = begin + a_.slice < length ? begin + a_.slice : length;
    if (begin >= end) return;
    fold_range<typename W::Fold, W::kSize>(p_, view, begin * a_.shape.elem_bytes,
                                           end * a_.shape.elem_bytes, packs);
  }

  // Divisions that close avg where no fold saw all ranks: one for each chunk of this rank's output.
  PYCOLL_DEVICE uint32_t divisions() const {
    if (a_.shape.scale_at_exit == 0 || p_.shared().out[m_.rank()] == nullptr) return 0;
    return own_chunks();
  }

  // Division i as an instruction; its piece lies in the block's memory.
  PYCOLL_DEVICE Instr division(uint32_t i) {
    p_.barrier();
    const uint32_t first = a_.shape.layout_out == kLayoutOwn ? m_.rank() * own_chunks() : 0;
    const auto rank = static_cast<uint16_t>(m_.rank());
    if (p_.tid() == 0) {
      p_.shared().piece = {rank, static_cast<uint16_t>(Buffer::kOut), first + i};
    }
    p_.barrier();
    return {static_cast<uint8_t>(Opcode::kFold), kDivide, 1, 1, 0, 0, 1, 0};
  }

 private:
  static constexpr uint8_t kLayoutOwn = 1, kLayoutTable = 2;  // Layout of bind.h
  static constexpr uint8_t kDivide = 0x80;                    // Instr::flags of a division

  PYCOLL_DEVICE uint32_t own_chunks() const {
    const bool own = a_.shape.layout_out == kLayoutOwn;
    return own ? a_.shape.chunks / a_.world_size : a_.shape.chunks;
  }

  // Address of chunk k of a piece in this segment, and how many elements it has from there.
  PYCOLL_DEVICE char* resolve(const Operand& operand, uint32_t k, uint64_t& extent) const {
    const Shape& shape = a_.shape;
    if (operand.buffer == static_cast<uint16_t>(Buffer::kStaging)) {
      extent = kUnbounded;
      return a_.cells[operand.rank] + (m_.segment() & 1) * a_.cell_bytes +
             (operand.chunk + k) * shape.stride;
    }
    const bool in = operand.buffer == static_cast<uint16_t>(Buffer::kIn);
    char* const base = in ? p_.shared().in[operand.rank] : p_.shared().out[operand.rank];
    uint32_t chunk = operand.chunk + k;
    if (chunk >= shape.chunks) chunk -= shape.chunks;
    const uint8_t layout = in ? shape.layout_in : shape.layout_out;
    uint64_t offset, length;
    if (layout == kLayoutTable) {
      const Table& table = in ? shape.in_table : shape.out_table;
      const uint64_t entry = uint64_t{operand.rank} * shape.chunks + chunk;
      offset = table.offset[entry];
      length = table.length[entry];
    } else {
      offset = chunk * shape.chunk;
      length = offset < shape.count ? shape.count - offset : 0;
      if (length > shape.chunk) length = shape.chunk;
      if (layout == kLayoutOwn) {
        offset -= uint64_t{operand.rank} * (shape.chunks / a_.world_size) * shape.chunk;
      }
    }
    extent = length > start_ ? length - start_ : 0;
    return base + (offset + start_) * shape.elem_bytes;
  }

  Member<P>& m_;
  const Launch& a_;
  const P& p_;
  uint64_t start_ = 0;  // first element of the segment within a chunk
  uint64_t reach_ = 0;  // elements of the largest chunk in this segment
};

// WAITs from instruction i on that the threads of a block can do at once: those of one fold, for
// rising peers.
PYCOLL_DEVICE uint32_t waits_at(const Program& program, uint32_t i) {
  uint32_t end = i + 1;
  while (end < program.size && program.code[end].op == static_cast<uint8_t>(Opcode::kWait) &&
         program.code[end].peer > program.code[end - 1].peer) {
    ++end;
  }
  return end - i;
}

// One segment of a program. False: this rank has to leave.
template <typename W, typename P>
PYCOLL_DEVICE bool run_program(Member<P>& m, Pieces<P>& pieces, const Program& program) {
  const P& p = m.p();
  const uint32_t end = program.size + pieces.divisions();
  for (uint32_t i = 0; i < end;) {
    const Instr instr = i < program.size ? program.code[i] : pieces.division(i - program.size);
    uint32_t used = 1;
    if (instr.op == static_cast<uint8_t>(Opcode::kFold)) {
      for (uint32_t k = 0; k < instr.count; ++k) {
        pieces.template fold<W>(instr, program.operands + instr.arg, k);
      }
    } else if (instr.op == static_cast<uint8_t>(Opcode::kSignal)) {
      m.signal(instr.arg);
    } else {
      used = waits_at(program, i);
      bool fine = true;
      for (uint32_t t = p.tid(); t < used; t += p.threads()) {
        const Instr wait = program.code[i + t];
        fine &= m.await_step(wait.peer, wait.arg, i + t);
      }
      if (p.any(!fine)) return false;
    }
    i += used;
  }
  return true;
}

// One block of one rank interprets its program, segment after segment.
template <typename W, typename P>
PYCOLL_DEVICE void run_rank(const P& p, const Launch& launch, uint32_t rank, uint32_t block) {
  if (launch.absent >> rank & 1) return;
  Member<P> m(p, launch, rank, block);
  if (!m.enter()) return;
  const Program program = launch.programs[rank - launch.first_rank];
  Pieces<P> pieces(m);
  for (uint32_t segment = 0; segment < launch.shape.segments; ++segment) {
    if (segment > 0) {
      if (!m.next_segment()) return;
      pieces.begin_segment();
    }
    if (!run_program<W>(m, pieces, program)) return;
  }
  m.finish();
}

}  // namespace pycoll::cuda
