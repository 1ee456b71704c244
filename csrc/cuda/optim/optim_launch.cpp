// Passes over flat vectors: what is checked, how elements are shared by threads, launches.
#include "cuda/optim/optim_launch.h"

#include <algorithm>
#include <initializer_list>

#include "cuda/host/machine.h"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kPackBytes = 16;     // of the widest type
constexpr uint64_t kMostBlocks = 4096;  // some times what is resident on the largest devices

// A vector that a pass reads or writes; null: it does without.
struct Vector {
  const void* data;
  DType type;
};

// Shares the elements of vectors, `packs_each` packs to a thread unless that makes too many blocks.
Span share(uint64_t count, std::initializer_list<Vector> vectors, int threads,
           uint64_t packs_each) {
  size_t widest = 1;
  for (const Vector& v : vectors) {
    if (v.data != nullptr) widest = std::max(widest, itemsize(v.type));
  }
  const uint64_t pack = kPackBytes / widest;
  bool alike = true, met = false;
  Span span{count, 0, 0, 1, 0};
  for (const Vector& v : vectors) {
    if (v.data == nullptr) continue;
    const auto address = reinterpret_cast<uintptr_t>(v.data);
    const size_t size = itemsize(v.type);
    COLL_CHECK(address % size == 0, "ArgumentError",
               "a pointer is not a multiple of the element size ", size);
    const uint64_t head = (pack - address / size % pack) % pack;
    alike &= !met || head == span.head;
    span.head = head;
    met = true;
  }
  if (alike && count >= span.head) span.packs = (count - span.head) / pack;
  const uint64_t items = std::max(span.packs, count - span.packs * pack);
  const uint64_t each = packs_each * static_cast<uint64_t>(threads);
  span.blocks =
      static_cast<uint32_t>(std::clamp<uint64_t>((items + each - 1) / each, 1, kMostBlocks));
  return span;
}

void launch(const void* kernel, const Span& span, int threads, const void* parameter, size_t nbytes,
            void* stream) {
  machine::launch(-1, kernel, static_cast<int>(span.blocks), threads, parameter, nbytes, false,
                  stream);
}

void launch(const void* kernel, const PassLaunch& pass, int threads, void* stream) {
  launch(kernel, pass.span, threads, &pass, sizeof(pass), stream);
}

const char* bytes_of(const void* data) { return static_cast<const char*>(data); }
char* bytes_of(void* data) { return static_cast<char*>(data); }

}  // namespace

void launch_step(const PycollCudaStep& s, void* stream) {
  COLL_CHECK(s.kind >= 0 && s.kind < kOptimKindCount, "ArgumentError", "no optimizer ", s.kind);
  const OptimTypes types{static_cast<DType>(s.state), static_cast<DType>(s.grad_type),
                         static_cast<DType>(s.copy_type)};
  const int pair = optim_pair(types, s.copy != nullptr);
  const auto kind = static_cast<OptimKind>(s.kind);
  if (s.count == 0) return;
  COLL_CHECK(s.param != nullptr && s.grad != nullptr &&
                 (kind == OptimKind::kSgd || s.slots[0] != nullptr) &&
                 (kind != OptimKind::kAdamw || s.slots[1] != nullptr),
             "ArgumentError", "a vector of the step is null");
  const OptimArgs args{s.param, s.grad,  {s.slots[0], s.slots[1]},
                       s.copy,  s.count, s.scale,
                       s.keep,  s.rate,  s.beta1,
                       s.beta2, s.root,  s.eps,
                       s.decay};
  const Span span = share(s.count,
                          {{s.param, types.state},
                           {s.grad, types.grad},
                           {s.slots[0], types.state},
                           {s.slots[1], types.state},
                           {s.copy, types.copy}},
                          kPassThreads, 1);
  const StepLaunch step{span,
                        bytes_of(s.param),
                        bytes_of(s.grad),
                        {bytes_of(s.slots[0]), bytes_of(s.slots[1])},
                        bytes_of(s.copy),
                        round_scalars<float>(args),
                        round_scalars<double>(args)};
  launch(kOptimKernels.steps[s.kind][pair], span, kPassThreads, &step, sizeof(step), stream);
}

void launch_unscale(int dtype, const void* in, void* out, uint64_t count, double scale,
                    uint64_t* odd, void* stream) {
  const auto type = static_cast<DType>(dtype);
  const int kind = optim_float(type);
  if (count == 0) return;
  const DType wide = kind == kOptimDouble ? type : DType::kFloat32;
  const Span span = share(count, {{in, type}, {out, wide}}, kPassThreads, 1);
  launch(kOptimKernels.unscale[kind], PassLaunch{span, bytes_of(in), bytes_of(out), odd, scale},
         kPassThreads, stream);
}

void launch_nonfinite(int dtype, const void* data, uint64_t count, uint64_t* odd, void* stream) {
  const auto type = static_cast<DType>(dtype);
  const int kind = optim_float(type);
  if (count == 0) return;
  constexpr uint64_t kPacks = 4;  // nothing is written: more is read at a time
  const Span span = share(count, {{data, type}}, kPassThreads, kPacks);
  launch(kOptimKernels.nonfinite[kind], PassLaunch{span, bytes_of(data), nullptr, odd, 0},
         kPassThreads, stream);
}

void launch_squares(int dtype, const void* data, uint64_t count, uint64_t* tally, void* stream) {
  const auto type = static_cast<DType>(dtype);
  const int kind = optim_float(type);
  if (count == 0) return;
  constexpr uint64_t kPacks = 16;  // enough to make up for clearing and adding the columns
  const int threads = kind == kOptimDouble ? kSquareThreads<double> : kSquareThreads<float>;
  const Span span = share(count, {{data, type}}, threads, kPacks);
  launch(kOptimKernels.squares[kind], PassLaunch{span, bytes_of(data), nullptr, tally, 0}, threads,
         stream);
}

}  // namespace pycoll::cuda
