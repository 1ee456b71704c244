"""Ranks in a grid: places, shifts, halos, exchanges between neighbours."""

import contextlib

import numpy as np
import pytest

from pycoll.comm.grid import complete
from pycoll.errors import ArgumentError, CollTimeout, MismatchError, PeerRejected, Revoked
from pycoll.testing import run_processes, run_threads


def test_lengths_that_are_left_out():
    assert complete((0, 0), 12) == (4, 3)
    assert complete((0, 2), 12) == (6, 2)
    assert complete((0, 0, 0), 8) == (2, 2, 2)
    assert complete((0,), 7) == (7,)
    for shape, n in (((2, 2), 5), ((0, 3), 8), ((-1, 0), 4), ((), 1)):
        with pytest.raises(ArgumentError, match=f"does not hold {n} ranks"):
            complete(shape, n)


def places(comm):
    grid = comm.grid((2, 3), periods=(False, True))
    return grid.coords, grid.shift(0), grid.shift(1), grid.shift(1, -2), grid.rank_at(grid.coords)


def test_places_and_shifts():
    for rank, (coords, rows, columns, back, same) in enumerate(run_threads(6, places)):
        row, column = divmod(rank, 3)
        assert coords == (row, column)
        assert same == rank
        assert rows == ((None, 3 + column) if row == 0 else (column, None))
        assert columns == (3 * row + (column - 1) % 3, 3 * row + (column + 1) % 3)
        assert back == (3 * row + (column + 2) % 3, 3 * row + (column - 2) % 3)


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("periods", [True, False])
@pytest.mark.parametrize("width", [1, 2])
def test_a_halo_is_what_the_whole_array_has_there(run, periods, width):
    whole = np.arange(8 * 12.0).reshape(8, 12)
    mode = {"mode": "wrap"} if periods else {"constant_values": -1.0}
    padded = np.pad(whole, width, **mode)

    def ranks(comm):
        grid = comm.grid((2, 2), periods=periods)
        row, column = grid.coords[0] * 4, grid.coords[1] * 6
        x = np.full((4 + 2 * width, 6 + 2 * width), -1.0)
        x[width:-width, width:-width] = whole[row : row + 4, column : column + 6]
        for _ in range(2):
            assert grid.halo(x) is x if width == 1 else grid.halo(x, width) is x
        want = padded[row : row + 4 + 2 * width, column : column + 6 + 2 * width]
        return np.array_equal(x, want)

    assert all(run(4, ranks))


def test_more_axes_than_the_grid_and_rings_of_one():
    def ranks(comm):
        grid = comm.grid((comm.world_size, 1), periods=True)
        x = np.arange(5 * 3 * 2.0).reshape(5, 3, 2) + 100 * comm.rank
        left, right = grid.shift(0)
        grid.halo(x)
        inner = np.arange(5 * 3 * 2.0).reshape(5, 3, 2)
        good = np.array_equal(x[0, 1], inner[3, 1] + 100 * left)
        good &= np.array_equal(x[4, 1], inner[1, 1] + 100 * right)
        return good and np.array_equal(x[:, 0], x[:, 1]) and np.array_equal(x[:, 2], x[:, 1])

    assert all(run_threads(3, ranks))


def exchanged(comm):
    grid = comm.grid((2, 2), periods=(True, False))
    mine = np.array([comm.rank])
    around = grid.neighbor_all_gather(mine)
    told = grid.neighbor_all_to_all([np.array([comm.rank, way]) for way in range(4)])
    moved = grid.move(mine.copy(), 1)
    return grid.neighbors(), around, told, moved


def test_exchanges_between_neighbours():
    for rank, (ends, around, told, moved) in enumerate(run_threads(4, exchanged)):
        row, column = divmod(rank, 2)
        other = 2 * (1 - row) + column
        assert ends == [
            other,
            other,
            None if column == 0 else rank - 1,
            rank + 1 if not column else None,
        ]
        assert [None if x is None else int(x[0]) for x in around] == ends
        wanted = [None if end is None else [end, way ^ 1] for way, end in enumerate(ends)]
        assert [None if x is None else x.tolist() for x in told] == wanted
        assert moved == (rank if column == 0 else rank - 1)


def test_what_does_not_fit():
    def ranks(comm):
        with pytest.raises((ArgumentError, PeerRejected), match="does not hold 2 ranks"):
            comm.grid((3,))
        grid = comm.grid((2,))
        with pytest.raises(ArgumentError, match="a halo of width 1 on a grid of 1 axes"):
            grid.halo(np.zeros(2))
        return repr(grid)

    assert run_threads(2, ranks)[1] == "<pycoll.Grid 2, rank 1 at (1,)>"


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_after_a_message_that_does_not_fit_all_are_in_step(run, shape):
    def ranks(comm):
        grid, told = comm.grid(shape, periods=True), []
        for attempt in range(4):
            odd = comm.rank == 0 and attempt == 1
            x = np.full(4, 10.0 * attempt + comm.rank)
            wanted = [10.0 * attempt + r for r in grid.neighbors()]
            x = x.astype(np.float32 if odd else np.float64)
            calls = (
                lambda x: [float(a.flat[0]) for a in grid.neighbor_all_gather(x)],
                lambda x: [float(grid.move(x, 0).flat[0])],
            )
            for call, right in zip(calls, (wanted, wanted[:1]), strict=True):
                try:
                    assert call(x) == right
                except MismatchError as error:
                    told.append("dropped; the grid stays usable" in str(error))
                    assert attempt == 1
        return told

    results = run(4, ranks)
    assert all(map(all, results))
    assert [len(told) for told in results] == ([2, 2, 0, 1] if len(shape) == 1 else [2, 1, 2, 0])


def test_a_halo_of_another_width_does_not_stay_behind():
    def ranks(comm):
        grid, told = comm.grid((3,)), 0
        for attempt in range(3):
            width = 2 if comm.rank == 0 and attempt == 0 else 1
            x = np.full(9, 10.0 * attempt + comm.rank)
            try:
                grid.halo(x, width)
            except MismatchError:
                told += 1
                continue
            if comm.rank < 2:
                assert x[-1] == 10.0 * attempt + comm.rank + 1
            if comm.rank > 0:
                assert x[0] == 10.0 * attempt + comm.rank - 1
        return told

    assert run_threads(3, ranks) == [1, 1, 0]


def test_a_refused_halo_sends_nothing_and_gets_nothing():
    def ranks(comm):
        grid, x = comm.grid((2,)), np.full(9, 1.0 + comm.rank)
        if comm.rank == 0:
            with pytest.raises(ArgumentError, match="timeout=-1"):
                grid.halo(x, timeout=-1)
            x[:] = 5
        grid.halo(x)
        return x.tolist()

    assert run_threads(2, ranks) == [[5] * 8 + [2], [5] + [2] * 8]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_margin_for_which_the_wrong_has_come_stays_as_it_is(order):
    def ranks(comm):
        grid, width = comm.grid((3,)), 2 if comm.rank == 0 else 1
        x = np.full((9, 4), 1.0 + comm.rank, order=order)
        with contextlib.suppress(MismatchError):
            grid.halo(x, width)
        return x[:, 0].tolist()

    assert run_threads(3, ranks) == [[1] * 9, [2] * 8 + [3], [2] + [3] * 8]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_margin_that_comes_too_late_changes_nothing(order):
    """The neighbour has its own in time, and the next halo gets the next margin."""

    def ranks(comm):
        grid, x = comm.grid((2,)), np.full((6, 4), 1.0 + comm.rank, order=order)
        if comm.rank == 0:
            with pytest.raises(CollTimeout):
                grid.halo(x, timeout=0.05)
            x[:] = 5
            comm.barrier()
        else:
            comm.barrier()
            grid.halo(x)
        comm.barrier()
        before = x[:, 0].tolist()
        x[:] = 7 + comm.rank
        return before, grid.halo(x)[:, 0].tolist()

    late, in_time = run_threads(2, ranks)
    assert late == ([5] * 6, [7] * 5 + [8])
    assert in_time == ([1] + [2] * 5, [7] + [8] * 5)


def test_the_next_move_does_not_get_what_comes_too_late():
    def ranks(comm):
        grid, x = comm.grid((2,), periods=True), np.full(4, 1.0 + comm.rank)
        if comm.rank == 0:
            with pytest.raises(CollTimeout):
                grid.move(x, 0, timeout=0.05)
            comm.barrier()
        else:
            comm.barrier()
            grid.move(x, 0)
        comm.barrier()
        return x[0], grid.move(np.full(4, 5.0 + comm.rank), 0)[0]

    assert run_threads(2, ranks) == [(1, 6), (1, 5)]


def test_nobody_gets_a_large_margin_of_an_array_that_may_have_changed():
    def ranks(comm):
        grid, x = comm.grid((2,)), np.full((6, 1 << 18), 1.0)
        if comm.rank == 0:
            with pytest.raises(CollTimeout):
                grid.halo(x, timeout=0.05)
            x[:] = 5
            comm.barrier()
        else:
            comm.barrier()
            with pytest.raises(Revoked, match="a send was not received in time"):
                grid.halo(x)
        return True

    assert run_threads(2, ranks) == [True] * 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: g.shift(2), r"axis=2; accepted: 0 to 0"),
        (lambda g: g.move(np.ones(3), 7), r"axis=7; accepted"),
        (lambda g: g.rank_at((0, 1)), r"coords=\(0, 1\); expected 1 integers"),
        (lambda g: g.coords_of(9), r"rank=9; accepted: 0 to 0"),
        (lambda g: g.halo([1, 2, 3]), "x is a list; a halo needs a NumPy array"),
        (lambda g: g.halo(np.broadcast_to(1.0, 9)), "x is a read-only array"),
        (lambda g: g.halo(np.ones(9), 1.0), r"width=1.0; expected a number of elements"),
        (lambda g: g.neighbor_all_to_all([np.ones(1)]), r"xs has 1 arrays; expected 2"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(call, text):
    def ranks(comm):
        grid = comm.grid((1,))
        with pytest.raises(ArgumentError, match=text):
            call(grid)

    run_threads(1, ranks)


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((2.9, 1), {}, "expected a length for each axis"),
        ("22", {}, "expected a length for each axis"),
        ((1, 1), {"periods": (True,)}, r"periods=\(True,\); expected one for all axes, or 2"),
    ],
)
def test_grids_that_cannot_be(shape, options, text):
    def ranks(comm):
        with pytest.raises(ArgumentError, match=text):
            comm.grid(shape, **options)

    run_threads(1, ranks)
