"""V-variants whose sizes change from call to call, beside NumPy."""

import random

import numpy as np
import pytest

from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.runtime.calls.parts import v_variants
from pycoll.testing import run_processes, run_threads

DTYPES = ["f4", "f8", "i2", "u1", "c16", "S5", "M8[s]", "f2", "?", "V3", "V2000"]
OF_TENSORS = ["f4", "f8", "i2", "i8", "u1", "f2", "?", "c8"]
TAILS = [(), (3,), (2, 2), (0,)]


def rows_of(seed, count, tail, dtype):
    """Return an array of rows of any bytes that its type can have."""
    most = 2 if dtype.kind == "b" else 100
    shape = (count, *tail, dtype.itemsize)
    raw = np.random.default_rng(seed).integers(0, most, shape, dtype=np.uint8)
    return raw.view(dtype).reshape(count, *tail) if raw.size else np.zeros((count, *tail), dtype)


def same(found, expected):
    as_bytes = found.tobytes() == expected.tobytes()
    return as_bytes and (found.dtype, found.shape) == (expected.dtype, expected.shape)


class Program:
    """Random calls, the same on all ranks."""

    def __init__(self, comm, seed, dtypes=DTYPES, given=np.asarray):
        self.comm, self.rng = comm, random.Random(seed)
        self.dtypes, self.given = dtypes, given  # given: makes an array of another library
        self.n, self.me = comm.world_size, comm.rank

    def draw(self):
        rng, n = self.rng, self.n
        self.dtype, self.tail = np.dtype(rng.choice(self.dtypes)), rng.choice(TAILS)
        most = min(rng.choice([0, 1, 9, 9, 9, 5000]), 20_000 // self.dtype.itemsize)
        self.rows = [[rng.randint(0, most) for _ in range(n)] for _ in range(n)]
        self.seeds = [rng.randrange(1 << 30) for _ in range(n)]

    def of(self, rank, count):
        return rows_of(self.seeds[rank], count, self.tail, self.dtype)

    def ends_well(self, call, x, *args, expected, came):
        """Make a call; whether its result, and the counts where they are asked for, are right."""
        counted = self.rng.random() < 0.5
        given = self.given(x)
        found = call(given, *args, return_counts=counted)
        if counted:
            found, counts = found
            if counts.dtype != np.int64 or counts.tolist() != came:
                return False
        if expected is None or found is None:
            return found is expected
        return type(found) is type(given) and same(np.asarray(found), expected)

    def gathers(self):
        came = [rows[0] for rows in self.rows]
        xs, root = [self.of(r, count) for r, count in enumerate(came)], self.rng.randrange(self.n)
        x, expected = xs[self.me], np.concatenate(xs)
        if self.rng.random() < 0.5:
            return self.ends_well(self.comm.all_gather_v, x, expected=expected, came=came)
        expected = expected if self.me == root else None
        return self.ends_well(self.comm.gather_v, x, root, expected=expected, came=came)

    def exchanges(self):
        xs = [self.of(r, sum(self.rows[r])) for r in range(self.n)]
        cut = [np.split(x, np.cumsum(rows)[:-1]) for x, rows in zip(xs, self.rows, strict=True)]
        expected = np.concatenate([blocks[self.me] for blocks in cut])
        counts = self.rng.choice([list, tuple, np.array])(self.rows[self.me])
        came = [rows[self.me] for rows in self.rows]
        call, x = self.comm.all_to_all_v, xs[self.me]
        return self.ends_well(call, x, counts, expected=expected, came=came)

    def fails(self):
        odd = self.me == self.rng.randrange(self.n)
        first = [3] + [0] * (self.n - 1)
        with pytest.raises(MismatchError, match="field 'dtype'"):
            self.comm.all_gather_v(np.ones((3, 2), "f8" if odd else "f4"))
        with pytest.raises(MismatchError, match="field 'row'"):
            self.comm.all_to_all_v(np.ones((3, 5 if odd else 2), "f4"), first)
        with pytest.raises((ArgumentError, PeerRejected), match=r"counts add up to 3.*4 rows"):
            self.comm.all_to_all_v(np.ones((4 if odd else 3, 2), "f4"), first)
        return True

    def run(self):
        for _ in range(60):
            self.draw()
            call = self.rng.choice([self.gathers, self.exchanges])
            if self.n > 1 and self.rng.random() < 0.1:
                call = self.fails
            assert call(), (call.__name__, self.dtype, self.tail, self.rows)
        return True


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_random_sizes(n):
    for seed in range(3):
        assert run_threads(n, lambda comm, seed=seed: Program(comm, seed).run()) == [True] * n


def test_random_sizes_between_processes():
    assert run_processes(3, lambda comm: Program(comm, 9).run()) == [True] * 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_random_sizes_of_tensors(n):
    torch = pytest.importorskip("torch")
    run = run_processes if n == 2 else run_threads
    for seed in range(3):

        def ranks(comm, seed=seed):
            return Program(comm, seed, OF_TENSORS, torch.from_numpy).run()

        assert run(n, ranks) == [True] * n


def tensor_of_ones(size):
    return pytest.importorskip("torch").ones(size)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("ones", [np.ones, tensor_of_ones])
def test_other_sizes_take_no_python_code(monkeypatch, ones, counted):
    ones(1)  # skips where there is no torch

    def ranks(comm):
        def calls(size):
            x, asked = ones(size), {"return_counts": counted}
            found = comm.all_gather_v(x, **asked), comm.gather_v(x, **asked)
            found = [*found, comm.all_to_all_v(x, [size - 1, 1], **asked)]
            results = [y[0] for y in found] if counted else found
            return [None if y is None else len(y) for y in results]

        calls(2 + comm.rank)
        with monkeypatch.context() as changed:
            changed.setattr(v_variants, "gather", None)
            changed.setattr(v_variants, "all_to_all", None)
            return [calls(3 * (comm.rank + 1) + step) for step in range(3)]

    for at, found in enumerate(run_processes(2, ranks)):
        for step, sizes in enumerate(found):
            whole = 9 + 2 * step
            assert sizes == [whole, None if at else whole, 2 if at else whole - 2]
