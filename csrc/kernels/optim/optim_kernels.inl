// The optimizer kernels, written once for all instruction sets; included behind fold_kernels.inl.
// Compile with -ffp-contract=off: products and sums stay apart.

struct NoCopy {};

// With -fno-math-errno the compiler makes one instruction of it.
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

#define PYCOLL_FORMULA PYCOLL_INLINE
#include "kernels/optim/optim_formulas.inl"
#include "kernels/routes/routes_kernels.inl"

// N elements from element i on.
template <OptimKind K, typename T, typename G, typename C, int N>
PYCOLL_INLINE void step_lanes(const OptimArgs& a, const OptimScalars<T>& scalars, size_t i) {
  using V = Vec<T, N>;
  char* const param = static_cast<char*>(a.param) + i * sizeof(T);
  char* const first = static_cast<char*>(a.slots[0]) + i * sizeof(T);
  char* const second = static_cast<char*>(a.slots[1]) + i * sizeof(T);
  const V grad = Lanes<G, T, N>::load(static_cast<const char*>(a.grad) + i * sizeof(G));
  V p = load_raw<V>(param), m{}, v{};
  if constexpr (K != OptimKind::kSgd) m = load_raw<V>(first);
  if constexpr (K == OptimKind::kAdamw) v = load_raw<V>(second);
  step_values<K, N>(scalars, grad, p, m, v);
  if constexpr (K != OptimKind::kSgd) store_raw(first, m);
  if constexpr (K == OptimKind::kAdamw) store_raw(second, v);
  store_raw(param, p);
  if constexpr (!std::is_same_v<C, NoCopy>) {
    store_raw(static_cast<char*>(a.copy) + i * sizeof(C), Lanes<T, C, N>::pack(p));
  }
}

template <OptimKind K, typename T, typename G, typename C>
void step(const OptimArgs& args) {
  constexpr int kLanes = kWidth / sizeof(T);
  const OptimArgs a = args;  // in registers: stores through char* do not alias it
  const OptimScalars<T> scalars = round_scalars<T>(args);
  size_t i = 0;
  for (; i + kLanes <= a.count; i += kLanes) step_lanes<K, T, G, C, kLanes>(a, scalars, i);
  for (; i < a.count; ++i) step_lanes<K, T, G, C, 1>(a, scalars, i);
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

template <typename V>
PYCOLL_INLINE double add_lanes(V v) {
  double total = 0;
  for (size_t i = 0; i < sizeof(V) / sizeof(double); ++i) total += v[i];
  return total;
}

// With sigma >= (count + 2) * max |v| a power of two, q = (v + sigma) - sigma is v rounded to a
// multiple of sigma / 2^53, v - q is exact, and so is every sum of the q.
template <typename T>
int extract(const void* data, size_t count, double* rest, double* sums) {
  constexpr int kLanes = kWidth / sizeof(double);
  constexpr uint64_t kMargin = 11;  // 2^11 * 2^exponent >= (512 + 2) * max
  using D = Vec<double, kLanes>;
  using U = Vec<uint64_t, kLanes>;
  const char* const from = static_cast<const char*>(data);
  char* const to = reinterpret_cast<char*>(rest);
  D top{}, gap{};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto x = convert<double, kLanes>(load_raw<Vec<T, kLanes>>(from + i * sizeof(T)));
    const D v = x * x;
    store_raw(to + i * sizeof(double), v);
    top = v > top ? v : top;
    gap += v - v;
  }
  const size_t padded = (count + kLanes - 1) / kLanes * kLanes;
  double highest = 0, odd = add_lanes(gap);
  for (; i < padded; ++i) {
    const double x = i < count ? load_raw<T>(from + i * sizeof(T)) : T(0);
    rest[i] = x * x;
    highest = rest[i] > highest ? rest[i] : highest;
    odd += rest[i] - rest[i];
  }
  for (int lane = 0; lane < kLanes; ++lane) highest = top[lane] > highest ? top[lane] : highest;
  const uint64_t exponent = __builtin_bit_cast(uint64_t, highest) >> 52;
  if (!(odd == 0)) return -1;
  if (highest == 0) return 0;
  if (exponent < 256 || exponent + kMargin > 2046) return -1;
  double sigma = __builtin_bit_cast(double, (exponent + kMargin) << 52);
  for (int pass = 0; pass < kExtractPasses; ++pass) {
    D sum{};
    U left{};
    for (size_t k = 0; k < padded; k += kLanes) {
      const D v = load_raw<D>(to + k * sizeof(double));
      const D q = (v + sigma) - sigma;
      const D r = v - q;
      store_raw(to + k * sizeof(double), r);
      sum += q;
      left |= __builtin_bit_cast(U, r);
    }
    sums[pass] = add_lanes(sum);
    uint64_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= left[lane];
    if (any == 0) return pass + 1;
    sigma *= 0x1p-42;  // what is left is at most sigma / 2^53
  }
  return kExtractPasses + 1;
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

constexpr Kernels make_kernels(const char* name) {
  Kernels table{};
  table.name = name;
  constexpr auto kAll = std::make_index_sequence<kDTypeCount * kReduceOpCount>();
  fill_folds<kShapeSerial>(table, kAll);
  fill_folds<kShapeTree>(table, kAll);
  table.stream = stream_bytes;
  fill_steps<OptimKind::kAdamw>(table.steps[0]);
  fill_steps<OptimKind::kSgd>(table.steps[1]);
  fill_steps<OptimKind::kMomentum>(table.steps[2]);
  fill_steps<OptimKind::kNesterov>(table.steps[3]);
  const UnscaleKernel unscales[kOptimFloats] = {unscale<float, float>, unscale<float, Half>,
                                                unscale<float, BFloat>, unscale<double, double>};
  for (int i = 0; i < kOptimFloats; ++i) table.unscale[i] = unscales[i];
  const WeighKernel weighs[kOptimFloats] = {weigh<float>, weigh<Half>, weigh<BFloat>,
                                            weigh<double>};
  for (int i = 0; i < kOptimFloats; ++i) table.weigh[i] = weighs[i];
  table.extract[0] = extract<float>;
  table.extract[1] = extract<double>;
  return table;
}

#undef PYCOLL_INLINE
