// The part of pycoll._C that steps optimizers. Vectors are addresses; callers keep them alive.
#include "kernels/optim/optim.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "kernels/fold/fold.h"

namespace py = pybind11;
namespace pycoll {
namespace {

void step(int kind, int state, int grad, int copy, uintptr_t param, uintptr_t gradient,
          uintptr_t first, uintptr_t second, uintptr_t target, size_t count,
          const std::array<double, 8>& scalars) {
  COLL_CHECK(kind >= 0 && kind < kOptimKindCount, "ArgumentError", "no optimizer ", kind);
  const OptimTypes types{static_cast<DType>(state), static_cast<DType>(grad),
                         static_cast<DType>(copy)};
  const auto& [scale, keep, rate, beta1, beta2, root, eps, decay] = scalars;
  const OptimArgs args{pointer(param),
                       pointer(gradient),
                       {pointer(first), pointer(second)},
                       pointer(target),
                       count,
                       scale,
                       keep,
                       rate,
                       beta1,
                       beta2,
                       root,
                       eps,
                       decay};
  py::gil_scoped_release release;
  optim_step(static_cast<OptimKind>(kind), types, args);
}

size_t unscale(int type, uintptr_t in, uintptr_t out, size_t count, double scale) {
  py::gil_scoped_release release;
  return optim_unscale(static_cast<DType>(type), pointer(in), pointer(out), count, scale);
}

size_t nonfinite(int type, uintptr_t data, size_t count) {
  py::gil_scoped_release release;
  return optim_nonfinite(static_cast<DType>(type), pointer(data), count);
}

size_t add_squares(int type, uintptr_t data, size_t count, py::array_t<int64_t>& limbs) {
  COLL_CHECK(limbs.ndim() == 1 && limbs.shape(0) == kExactLimbs && limbs.writeable(),
             "ArgumentError", "the accumulator has ", kExactLimbs, " limbs");
  int64_t* const out = limbs.mutable_data();
  py::gil_scoped_release release;
  return optim_add_squares(static_cast<DType>(type), pointer(data), count, out);
}

}  // namespace

void bind_optim(py::module_& m) {
  using namespace pybind11::literals;
  m.attr("EXACT_LIMBS") = kExactLimbs;
  m.attr("EXACT_BIAS") = kExactBias;
  m.def("optim_step", &step, "kind"_a, "state"_a, "grad"_a, "copy"_a, "param"_a, "gradient"_a,
        "first"_a, "second"_a, "target"_a, "count"_a, "scalars"_a);
  m.def("optim_unscale", &unscale, "type"_a, "input"_a, "output"_a, "count"_a, "scale"_a);
  m.def("optim_nonfinite", &nonfinite, "type"_a, "data"_a, "count"_a);
  m.def("optim_add_squares", &add_squares, "type"_a, "data"_a, "count"_a, "limbs"_a.noconvert());
  m.def("optim_isa", &isa_name);
  m.def("optim_force_isa", &force_isa, "name"_a);
}

}  // namespace pycoll
