"""V-variants like earlier ones, which only compare their sizes with those of then."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError, MismatchError
from pycoll.runtime.calls.parts import v_variants
from pycoll.testing import run_processes


class Blocks:
    """V-variants of `rows[r]` rows from each rank r; on `all_to_all_v` one goes to each other."""

    def __init__(self, comm):
        self.comm, self.me, self.n = comm, comm.rank, comm.world_size

    def call(self, name, x, out=None):
        """Make a call."""
        if name == "all_gather_v":
            return self.comm.all_gather_v(x, out=out)
        if name == "gather_v":
            return self.comm.gather_v(x, self.n - 1, out=out)
        counts = [len(x) - self.n + 1] + [1] * (self.n - 1)
        return self.comm.all_to_all_v(x, counts, out=out)

    def wrong(self, name, rows, given=False):
        """Return whether the result is wrong, in an array of the caller if `given`."""
        x = np.full((rows[self.me], 2), 10.0 * self.me)
        if name == "all_to_all_v":
            rows = [r - self.n + 1 if self.me == 0 else 1 for r in rows]
        want = np.concatenate([np.full((r, 2), 10.0 * i) for i, r in enumerate(rows)])
        if name == "gather_v" and self.me != self.n - 1:
            return self.call(name, x) is not None
        out = np.zeros_like(want) if given else None
        got = self.call(name, x, out)
        return not np.array_equal(got, want) or (given and got is not out)


def test_a_call_with_the_sizes_of_before_only_compares_them(monkeypatch):
    """One rank may have other sizes than before: then all ranks look again."""

    def looks(*_):
        raise AssertionError("the call was looked at again")

    def rank(comm):
        n, found, blocks = comm.world_size, [], Blocks(comm)
        wrong = blocks.wrong
        for name in ("all_gather_v", "gather_v", "all_to_all_v"):
            rows = [n + r for r in range(n)]
            others = [*rows[:-1], 2 * n + 5]  # of the last rank only
            found += [wrong(name, rows), wrong(name, rows), wrong(name, rows, given=True)]
            with monkeypatch.context() as patch:
                patch.setattr(v_variants, "_arrays", looks)
                found += [wrong(name, rows), wrong(name, rows, given=True)]
            found += [wrong(name, others), wrong(name, rows), wrong(name, others)]
            dtype = np.int32 if comm.rank == n - 1 else np.float64
            with pytest.raises(MismatchError, match="dtype"):
                blocks.call(name, np.zeros((rows[comm.rank], 2), dtype))
            found.append(wrong(name, rows))
        comm.all_to_all_v(np.zeros(n), [1] * n)
        with pytest.raises(ArgumentError, match="integers"):
            comm.all_to_all_v(np.zeros(n), [1.0] * n)
        return found

    for n in (2, 3):
        assert run_processes(n, rank) == [[False] * 27] * n


def test_counts_of_before_are_compared_all_the_same(monkeypatch):
    """Whatever a call that is remembered was given, one rank may give something else now."""

    def looks(*_):
        raise AssertionError("the call was looked at again")

    def rank(comm):
        me, n = comm.rank, comm.world_size
        counts = [r + 1 for r in range(n)]
        begin, end = sum(counts[:me]), sum(counts[: me + 1])
        x = np.arange(2.0 * sum(counts)).reshape(-1, 2)
        own, summed = x[begin:end], n * x[begin:end]
        root = n - 1

        def scatter(given=None, **options):
            given = counts if given is None else given
            return comm.scatter_v(x if me == root else x[:0], given, root, **options)

        def summing(given=None, op="sum", **options):
            return comm.reduce_scatter_v(x, counts if given is None else given, op, **options)

        calls = (
            (scatter, own),
            (summing, summed),
            (lambda given=None, **o: summing(given, "max", **o), own),
        )
        for call, want in calls:
            assert np.array_equal(call(), want)
            out = np.zeros_like(want)
            assert call(out=out) is out
            with monkeypatch.context() as patch:
                patch.setattr(v_variants, "_arrays", looks)
                again = call()
                assert np.array_equal(again, want)
                assert np.array_equal(call(out=out), want)
                assert np.array_equal(again, want)  # memory of its own
            with pytest.raises(MismatchError, match="field 'counts' differs"):
                call([*counts[1:], counts[0]] if me == root else counts)
            assert np.array_equal(call(tuple(counts)), want)
            assert np.array_equal(call(np.array(counts)), want)
            counts[0], counts[-1] = counts[-1], counts[0]  # the same list, with other numbers
            begin = sum(counts[:me])
            moved = x[begin : begin + counts[me]] * (n if want is summed else 1)
            assert np.array_equal(call(), moved)
            counts[0], counts[-1] = counts[-1], counts[0]
        return True

    for n in (2, 3):
        assert run_processes(n, rank) == [True] * n


def test_outputs_that_do_not_fit_after_one_that_did():
    """A repeated call looks at its output as the first one did."""

    def rank(comm):
        me, n = comm.rank, comm.world_size
        x, room = np.full(3, me + 1.0), np.zeros(3 * n + 3)
        want = np.repeat(np.arange(n) + 1.0, 3)
        for _ in range(2):
            assert comm.all_gather_v(x, out=room[: 3 * n]).base is room
            assert np.array_equal(room[: 3 * n], want)
        readonly = np.zeros(3 * n)
        readonly.flags.writeable = False
        for bad in (
            np.zeros(3 * n + 1),
            np.zeros(3 * n, np.float32),
            readonly,
            np.zeros(6 * n)[::2],
        ):
            with pytest.raises(ArgumentError, match="out"):
                comm.all_gather_v(x, out=bad)
        room[1:4] = me + 1.0  # the input lies in the output
        assert np.array_equal(comm.all_gather_v(room[1:4], out=room[: 3 * n]), want)
        return True

    for n in (2, 3):
        assert run_processes(n, rank) == [True] * n


def test_sixty_sizes_in_turn_are_remembered(monkeypatch):
    def looks(*_):
        raise AssertionError("the call was looked at again")

    def rank(comm):
        n = comm.world_size
        sizes = [[i + r + n for r in range(n)] for i in range(20)]
        for turn in range(2):
            if turn == 1:
                monkeypatch.setattr(v_variants, "_arrays", looks)
            for rows in sizes:
                for name in ("all_gather_v", "gather_v", "all_to_all_v"):
                    assert not Blocks(comm).wrong(name, rows)
        return True

    assert all(run_processes(2, rank))
