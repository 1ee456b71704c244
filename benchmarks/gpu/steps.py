"""Optimizer steps, checks and sums of squares: the bits of those on the CPU, then time.

Times are those of launches inside a CUDA graph. Beside them stands what the bytes that a pass reads
and writes would take at the speed of a copy.
"""

import functools

import numpy as np
from common import (
    MIB,
    copy_speed,
    data,
    filled,
    open_stage,
    same_bits,
    seconds_of,
    to_device,
    wide_floats,
)

from pycoll import kernels
from pycoll.cuda.device.library import library
from pycoll.types import DType

SIZES = (1, 1023, 100_003)
SPEED_MIB = 256  # of a vector of float32
ADAMW = {"keep": 0.999, "beta1": 0.9, "beta2": 0.99, "root": 1.1, "eps": 1e-8}
STEPS = {
    "adamw": (2, lambda p, g, m, **more: kernels.adamw(p, g, *m, **ADAMW, **more)),
    "sgd": (0, lambda p, g, m, **more: kernels.sgd(p, g, None, beta=0, decay=0.1, **more)),
    "nesterov": (
        1,
        lambda p, g, m, **more: kernels.sgd(p, g, m[0], beta=0.9, decay=0.1, nesterov=True, **more),
    ),
}


def vectors(states, grad, copy, count):
    """Return parameter, gradient, states and copy on the host."""
    made = data(2 + states, (count,), np.dtype(np.float32), seed=count)
    low = None if copy is None else np.zeros(count, copy)
    return made[0], made[1].astype(grad), [abs(x) for x in made[2:]], low


def on_device(cupy, given):
    """Copy such vectors to the device."""
    param, grad, states, copy = given
    moved = [to_device(cupy, x) for x in states]
    return (
        *(to_device(cupy, x) for x in (param, grad)),
        *(moved, None if copy is None else to_device(cupy, copy)),
    )


def vectors_there(cupy, states, grad, copy, count):
    """Make such vectors on the device, where large ones take no time."""
    single = np.dtype(np.float32)
    param, *moved = (filled(cupy, count, single, 1 / (k + 1)) for k in range(1 + states))
    low = None if copy is None else filled(cupy, count, copy, 0)
    return param, filled(cupy, count, grad, 0.75), moved, low


def check_steps(writer, cupy):
    """Compare steps of all types with the CPU's, aligned and not; a row for each."""
    low = [dtype for dtype in wide_floats() if dtype.itemsize == 2]
    for name, (states, step) in STEPS.items():
        for grad in wide_floats():
            for copy in (None, *low):
                wrong = []
                for size in SIZES:
                    given = vectors(states, grad, copy, size + 1)
                    moved = on_device(cupy, given)
                    for p, g, m, c in (given, moved):
                        more = {"rate": 0.01, "scale": 1 / 3}
                        step(p, g, m, copy=c, **more)
                        rest = None if c is None else c[1:]
                        step(p[1:], g[1:], [x[1:] for x in m], copy=rest, **more)
                    pairs = zip(
                        [given[0], *given[2], given[3]],
                        [moved[0], *moved[2], moved[3]],
                        strict=True,
                    )
                    if not all(x is None or same_bits(y.get(), x) for x, y in pairs):
                        wrong.append(size)
                facts = {"grad": grad.name, "copy": copy and copy.name, "wrong_sizes": wrong}
                writer.row("steps", not wrong, step=name, **facts)


def check_sums(writer, cupy):
    """Compare counts, unscaled vectors and limbs; a row for each type."""
    for dtype in (*wide_floats(), np.dtype(np.float64)):
        wrong = []
        for size in SIZES:
            x = data(1, (size,), dtype, seed=size)[0]
            x[::100] = np.inf
            found = []
            for v in (x, to_device(cupy, x)):
                limbs, wide = kernels.new_exact_sum(), "f8" if dtype.itemsize == 8 else "f4"
                out = np.zeros(size, wide) if v is x else cupy.zeros(size, wide)
                odd = kernels.unscale(v, out, 0.1), kernels.count_nonfinite(v)
                odd += (kernels.add_squares(v, limbs), kernels.add_squares(v[1:], limbs))
                found.append((odd, limbs.tobytes(), (out if v is x else out.get()).tobytes()))
            if found[0] != found[1]:
                wrong.append(size)
        writer.row("steps", not wrong, step="checks", grad=dtype.name, wrong_sizes=wrong)


def passes(cupy, count):
    """Yield the name of each pass, what runs it, and the bytes that it moves."""
    for grad in wide_floats():
        copy = None if grad.itemsize == 4 else grad
        for name, (states, step) in STEPS.items():
            p, g, m, c = vectors_there(cupy, states, grad, copy, count)
            run = functools.partial(step, p, g, m, copy=c, rate=1e-6)
            low = grad.itemsize + (0 if copy is None else copy.itemsize)
            yield (
                f"{name} {grad.name}",
                lambda stream, run=run: run(),
                (8 + 8 * states + low) * count,
            )
    for dtype in wide_floats():
        x, out = filled(cupy, count, dtype, 1), cupy.zeros(count, "f4")
        tally, kind = cupy.zeros(kernels.EXACT_LIMBS + 1, "u8"), DType[dtype.name.upper()]
        for name, more, nbytes in (
            ("unscale", (out.data.ptr, count, 0.5), dtype.itemsize + 4),
            ("nonfinite", (count,), dtype.itemsize),
            ("add_squares", (count,), dtype.itemsize),
        ):

            def run(stream, call=(f"optim_{name}", kind, x.data.ptr, *more, tally.data.ptr)):
                library().call(*call, stream.ptr)

            yield f"{name} {dtype.name}", run, nbytes * count


def measure(writer, cupy):
    """Measure a copy, then all passes over vectors of the same length."""
    nbytes = SPEED_MIB * MIB
    copied = copy_speed(writer, cupy, 1, nbytes)
    for name, run, moved in passes(cupy, nbytes // 4):
        spent = seconds_of(cupy, run, 5)
        share = moved / spent / copied
        writer.row("pass", kernel=name, nbytes=moved, seconds=spent, share=share)


def main():
    writer, cupy = open_stage()
    check_steps(writer, cupy)
    check_sums(writer, cupy)
    measure(writer, cupy)


if __name__ == "__main__":
    main()
