"""What every collective must return, said in NumPy; and data to try it on."""

import ml_dtypes
import numpy as np

FLOATS8 = ["float8_e4m3fn", "float8_e5m2"]
NAN8 = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}  # the only one that is combined to
FLOATS = [*FLOATS8, "float16", "bfloat16", "float32", "float64"]
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES = INTEGERS + FLOATS
ARITHMETIC = ["sum", "prod", "min", "max", "avg"]
BITWISE = ["and", "or", "xor"]
UFUNCS = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": lambda a, b: np.where((a < b) | (a != a), a, b),
    "max": lambda a, b: np.where((a > b) | (a != a), a, b),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def dtype(name):
    """Return a NumPy dtype by pycoll's name for it."""
    return np.dtype(getattr(ml_dtypes, name, name))


def ops(name):
    """Return the operations that are defined for a dtype."""
    return ARITHMETIC + (BITWISE if name in INTEGERS else [])


def serial(parts, combine):
    """Fold from the left: ``((p0 + p1) + p2) + ...``."""
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def tree(parts, combine):
    """Fold along the in-order balanced tree of docs/architecture.md."""
    power = 1 << (len(parts).bit_length() - 1)
    extra = len(parts) - power
    pairs = [combine(parts[2 * i], parts[2 * i + 1]) for i in range(extra)]
    level = pairs + list(parts[2 * extra :])
    while len(level) > 1:
        level = [combine(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def divide(total, n):
    """Divide as ``avg`` does: integers truncate towards zero."""
    if total.dtype.kind == "f":
        return total / total.dtype.type(n)
    quotient = total // total.dtype.type(n)
    return quotient + ((total < 0) & (quotient * total.dtype.type(n) != total)).astype(total.dtype)


def odd_booleans(rank, count):
    """Return truth values of which the true ones are any bytes but 0, and as NumPy means them."""
    rng = np.random.default_rng(rank)
    data = rng.integers(1, 256, count).astype(np.uint8) * rng.integers(0, 2, count).astype(np.uint8)
    return data.view(np.bool_), data != 0


def reduce(parts, op, order="tree"):
    """Combine one array per rank: floats of 8 and 16 bits in float32, rounded once at the end."""
    given = parts[0].dtype
    wide = np.dtype(np.float32) if given.itemsize <= 2 and given.name in FLOATS else given
    with np.errstate(all="ignore"):
        fold = serial if order == "rank" else tree
        total = fold([np.asarray(part, wide) for part in parts], UFUNCS[op])
        total = divide(total, len(parts)) if op == "avg" else total
        return np.asarray(total).astype(given)


def expected(collective, parts, op="sum", order="tree", root=0):
    """Return what each rank gets, None where it gets nothing.

    Args:
        collective: Name of the method of the communicator.
        parts: The input of each rank, ``[n]`` arrays.
        op: Operation of a reduction.
        order: Its order.
        root: Root rank.
    """
    n = len(parts)
    if collective in ("scan", "exscan"):
        last = [rank + (collective == "scan") for rank in range(n)]
        return [reduce(parts[:end], op, order) if end else neutral(parts[0], op) for end in last]
    reduces = collective in ("all_reduce", "reduce_scatter", "reduce")
    total = reduce(parts, op, order) if reduces else None
    at_root = [rank == root for rank in range(n)]
    if collective == "all_reduce":
        return [total] * n
    if collective == "reduce":
        return [total if mine else None for mine in at_root]
    if collective == "reduce_scatter":
        return np.split(total, n)
    if collective == "broadcast":
        return [parts[root]] * n
    if collective == "scatter":
        return np.split(parts[root], n)
    if collective == "all_to_all":
        blocks = [np.split(part, n) for part in parts]
        return [np.concatenate([blocks[peer][rank] for peer in range(n)]) for rank in range(n)]
    joined = np.concatenate([np.atleast_1d(part) for part in parts])
    if collective == "gather":
        return [joined if mine else None for mine in at_root]
    if collective == "all_gather":
        return [joined] * n
    raise ValueError(collective)


def neutral(like, op):
    """Return an array of what combining with leaves a value as it is."""
    kind = like.dtype
    if op in ("min", "max"):
        info = np.iinfo(kind) if kind.kind in "iu" else None
        most = 448 if kind.name == "float8_e4m3fn" else np.inf
        low, high = (info.min, info.max) if info else (-most, most)
        return np.full_like(like, high if op == "min" else low)
    bits = np.array(-1).astype(kind) if op == "and" else None
    return np.full_like(like, {"sum": 0, "prod": 1, "and": bits, "or": 0, "xor": 0}[op])


def differences(got, want):
    """Return how two arrays differ: shape, dtype or bits, NaNs being alike; "" if they do not."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"got {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    bits = np.dtype(f"u{got.dtype.itemsize}") if got.dtype.kind not in "cb" else None
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (got, want))
    same = (a.view(bits) == b.view(bits)) if bits else a == b
    wrong = np.flatnonzero(~(same | ((a != a) & (b != b))))
    if not len(wrong):
        return ""
    i = wrong[0]
    return f"{len(wrong)} of {a.size} differ, first at {i}: got {a[i]!r}, expected {b[i]!r}"


def random(rng, name, shape):
    """Return values of every magnitude that sums of a few ranks can tell apart."""
    kind = dtype(name)
    if name in INTEGERS:
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, kind, endpoint=True)
    return np.asarray(rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))).astype(kind)


def exact(rng, name, shape):
    """Return small integers, whose sums and products do not depend on the order.

    Types of 8 bits have but 3 or 4 digits: there sums over 8 ranks are exact.
    """
    most = 1 if name.startswith("float8") else 2
    least = 0 if "u" in name else -most
    return np.asarray(rng.integers(least, most + 1, shape)).astype(dtype(name))


def special(name):
    """Return a row of values that try a floating-point type: NaN, infinities, zeros, subnormals."""
    info = ml_dtypes.finfo(dtype(name))
    row = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5, float(info.max), -float(info.max)]
    row += [float(info.smallest_subnormal), -float(info.smallest_subnormal), float(info.tiny)]
    return np.array(row).astype(dtype(name))
