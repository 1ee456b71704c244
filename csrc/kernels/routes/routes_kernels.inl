// The weighted sum of rows, written once for all instruction sets; a part of optim_kernels.inl,
// which makes the table. Compile with -ffp-contract=off: products and sums stay apart.

template <typename T, int N, int kUnroll>
PYCOLL_INLINE void weigh_lanes(const char* const* rows, const Acc<T>* weights, size_t k, size_t i,
                               char* out) {
  using A = Acc<T>;
  Vec<A, N> sums[kUnroll];
  for (int u = 0; u < kUnroll; ++u) {
    sums[u] = Lanes<T, A, N>::load(rows[0] + (i + u * N) * sizeof(T)) * weights[0];
  }
  for (size_t j = 1; j < k; ++j) {
    for (int u = 0; u < kUnroll; ++u) {
      const Vec<A, N> part = Lanes<T, A, N>::load(rows[j] + (i + u * N) * sizeof(T)) * weights[j];
      sums[u] = sums[u] + part;
    }
  }
  for (int u = 0; u < kUnroll; ++u) {
    store_raw(out + (i + u * N) * sizeof(T), Lanes<A, T, N>::pack(sums[u]));
  }
}

template <typename T>
void weigh(const char* const* rows, const void* weights, size_t k, char* out, size_t count) {
  constexpr int kLanes = kWidth / sizeof(Acc<T>), kUnroll = 4;
  const auto* const w = static_cast<const Acc<T>*>(weights);
  size_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    weigh_lanes<T, kLanes, kUnroll>(rows, w, k, i, out);
  }
  for (; i < count; ++i) weigh_lanes<T, 1, 1>(rows, w, k, i, out);
}
