// The formulas of optim.h, written once for all machines. Included in a namespace of each
// instruction set, and in that of device code; whoever includes this has defined PYCOLL_FORMULA,
// how its functions are declared, and square_root<T, N>(V). Products and sums stay apart: compile
// with -ffp-contract=off, on a device with -fmad=false.

// V is T, or a vector of N of them. What a kind has no use for is left alone.
template <OptimKind K, int N, typename T, typename V>
PYCOLL_FORMULA void step_values(const OptimScalars<T>& a, V grad, V& param, V& first, V& second) {
  V g = grad * a.scale;
  if constexpr (K == OptimKind::kAdamw) {
    param = param * a.keep;
    first = first * a.beta1 + g * a.rest1;
    second = second * a.beta2 + (g * g) * a.rest2;
    param = param - a.rate * (first / (square_root<T, N>(second) * a.root + a.eps));
  } else {
    g = g + param * a.decay;
    if constexpr (K != OptimKind::kSgd) {
      first = first * a.beta1 + g;
      g = K == OptimKind::kNesterov ? V(g + first * a.beta1) : first;
    }
    param = param - a.rate * g;
  }
}
