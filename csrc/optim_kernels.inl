// The optimizer kernels, written once for all instruction sets; included as fold_kernels.inl is.
// Compile with -ffp-contract=off: products and sums stay apart.

#include "fold_lanes.inl"

struct NoCopy {};

template <typename T, int N>
inline Vec<T, N> square_root(Vec<T, N> v) {
  if constexpr (N == 1) {
    if constexpr (sizeof(T) == 4) return __builtin_sqrtf(v);
    return __builtin_sqrt(v);
  } else {
    for (int i = 0; i < N; ++i) v[i] = square_root<T, 1>(v[i]);
    return v;
  }
}

// N elements from element i on.
template <OptimKind K, typename T, typename G, typename C, int N>
PYCOLL_INLINE void step_lanes(const OptimArgs& a, size_t i) {
  using V = Vec<T, N>;
  char* const param = static_cast<char*>(a.param) + i * sizeof(T);
  char* const first = static_cast<char*>(a.slots[0]) + i * sizeof(T);
  char* const second = static_cast<char*>(a.slots[1]) + i * sizeof(T);
  const V grad = Lanes<G, T, N>::load(static_cast<const char*>(a.grad) + i * sizeof(G));
  V g = grad * T(a.scale);
  V p = load_raw<V>(param);
  if constexpr (K == OptimKind::kAdamw) {
    p = p * T(a.keep);
    const V m = load_raw<V>(first) * T(a.beta1) + g * T(1 - a.beta1);
    const V v = load_raw<V>(second) * T(a.beta2) + (g * g) * T(1 - a.beta2);
    store_raw(first, m);
    store_raw(second, v);
    p = p - T(a.rate) * (m / (square_root<T, N>(v) * T(a.root) + T(a.eps)));
  } else {
    g = g + p * T(a.decay);
    if constexpr (K != OptimKind::kSgd) {
      const V b = load_raw<V>(first) * T(a.beta1) + g;
      store_raw(first, b);
      g = K == OptimKind::kNesterov ? V(g + b * T(a.beta1)) : b;
    }
    p = p - T(a.rate) * g;
  }
  store_raw(param, p);
  if constexpr (!std::is_same_v<C, NoCopy>) {
    store_raw(static_cast<char*>(a.copy) + i * sizeof(C), Lanes<T, C, N>::pack(p));
  }
}

template <OptimKind K, typename T, typename G, typename C>
void step(const OptimArgs& args) {
  constexpr int kLanes = kWidth / sizeof(T);
  const OptimArgs a = args;  // in registers: stores through char* do not alias it
  size_t i = 0;
  for (; i + kLanes <= a.count; i += kLanes) step_lanes<K, T, G, C, kLanes>(a, i);
  for (; i < a.count; ++i) step_lanes<K, T, G, C, 1>(a, i);
}

// A value is finite if its difference with itself is 0, and not a NaN.
template <typename T, typename G, int N>
PYCOLL_INLINE void unscale_lanes(const char* in, char* out, T scale, Vec<T, N>& odd) {
  const Vec<T, N> v = Lanes<G, T, N>::load(in) * scale;
  store_raw(out, v);
  const Vec<T, N> gap = v - v;
  if constexpr (N == 1) {
    odd += gap == 0 ? T(0) : T(1);
  } else {
    odd += gap == 0 ? Vec<T, N>{} : Vec<T, N>{} + T(1);
  }
}

template <typename T, typename G>
size_t unscale(const void* in, void* out, size_t count, double scale) {
  constexpr int kLanes = kWidth / sizeof(T);
  constexpr size_t kBlock = size_t(1) << 20;  // counts below 2^24 are exact in float
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  size_t odd = 0;
  for (size_t done = 0; done < count;) {
    const size_t end = count - done < kBlock ? count : done + kBlock;
    Vec<T, kLanes> lanes{};
    T rest = 0;
    for (; done + kLanes <= end; done += kLanes) {
      unscale_lanes<T, G, kLanes>(from + done * sizeof(G), to + done * sizeof(T), T(scale), lanes);
    }
    for (; done < end; ++done) {
      unscale_lanes<T, G, 1>(from + done * sizeof(G), to + done * sizeof(T), T(scale), rest);
    }
    for (int i = 0; i < kLanes; ++i) rest += lanes[i];
    odd += static_cast<size_t>(rest);
  }
  return odd;
}

template <OptimKind K>
constexpr void fill_steps(OptimKernel* row) {
  const OptimKernel kernels[kOptimPairs] = {
      step<K, float, float, NoCopy>,  step<K, float, float, Half>,  step<K, float, float, BFloat>,
      step<K, float, Half, NoCopy>,   step<K, float, Half, Half>,   step<K, float, Half, BFloat>,
      step<K, float, BFloat, NoCopy>, step<K, float, BFloat, Half>, step<K, float, BFloat, BFloat>,
      step<K, double, double, NoCopy>};
  for (int i = 0; i < kOptimPairs; ++i) row[i] = kernels[i];
}

constexpr OptimIsa make_optim(const char* name) {
  OptimIsa isa{name,
               {},
               {unscale<float, float>, unscale<float, Half>, unscale<float, BFloat>,
                unscale<double, double>}};
  fill_steps<OptimKind::kAdamw>(isa.steps[0]);
  fill_steps<OptimKind::kSgd>(isa.steps[1]);
  fill_steps<OptimKind::kMomentum>(isa.steps[2]);
  fill_steps<OptimKind::kNesterov>(isa.steps[3]);
  return isa;
}
