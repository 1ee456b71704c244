"""Calls on Python objects, and how they become bytes."""

import itertools

import numpy as np
import pytest

from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.runtime.calls.parts.encoding import pack, unpack
from pycoll.testing import run_processes, run_threads

DATA = {
    "numbers": [1, -(2**63), 2**64 - 1, 2**200, -(2**20_000), 0.1, 1 - 2j, True, None],
    "groups": (1, (2, "x"), {3, 4}, frozenset("a"), []),
    5: b"bytes",
    (1, 2): {"deep": {"deeper": ["text", ""]}},
}


class Mine:
    def __eq__(self, other):
        return type(other) is Mine

    __hash__ = None


def test_data_comes_back_as_it_was():
    found = unpack(pack(DATA, False), False, "rank 0")
    assert found == DATA
    assert [type(x) for x in found["groups"]] == [type(x) for x in DATA["groups"]]


@pytest.mark.parametrize("code", [0, 2, 5, 42])
def test_types_of_ones_own_in_msgpack_are_no_objects(code):
    msgpack = pytest.importorskip("msgpack")
    data = pack([msgpack.ExtType(code, b""), 1], False)
    with pytest.raises(ArgumentError, match=f"ExtType came, of type {code}"):
        unpack(data, False, 0)


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        np.array(3 + 1j),
        np.zeros((0, 4), np.float16),
        np.array(["a", "bcd"]),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        np.datetime64("2020-01-02"),
        np.float32(1.5),
        np.arange(10)[::3],
    ],
    ids=str,
)
def test_arrays_come_back_as_they_were(x):
    found = unpack(pack({"x": [x]}, False), False, "rank 0")["x"][0]
    assert type(found) is type(x)
    assert found.dtype == x.dtype
    assert np.array_equal(found, x)


@pytest.mark.parametrize("x", [np.str_("a\0"), np.str_("\ud800"), np.bytes_(b"\0a\0"), np.bytes_()])
def test_texts_of_numpy_may_end_in_zeros(x):
    found = unpack(pack([x], False), False, 0)[0]
    assert type(found) is type(x)
    assert found == x


@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: [x, {1: (x,)}][1], lambda x: [[x]]])
def test_what_can_be_packed_can_be_read(wrap):
    """A process may have 8 MiB of stack, of which a nest must not take any."""

    def rank(comm):
        data, nest = [], 1

        def grow():
            nonlocal nest
            for depth in itertools.count():
                nest = wrap(nest)
                if depth % 30 == 0:
                    data.append(pack(nest, False))

        with pytest.raises(ArgumentError, match="recursion limit"):
            grow()
        return len(data) > 15, pack(unpack(data[-1], False, 0), False) == data[-1]

    assert run_processes(1, rank) == [(True, True)]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (type("Own", (np.float64,), {})(1.5), "an Own cannot be sent as data"),
        (Mine(), "a Mine cannot be sent as data.*pickle=True"),
        ([{"a": range(3)}], "a range cannot be sent"),
        (np.array([None]), "dtype object cannot be sent"),
    ],
)
def test_what_is_no_data_is_refused(x, text):
    with pytest.raises(ArgumentError, match=text):
        pack(x, False)


def test_a_nest_without_end_is_refused():
    x = []
    x.append(x)
    with pytest.raises(ArgumentError, match="cannot be sent"):
        pack(x, False)


def test_a_pickle_is_read_only_where_it_is_trusted():
    data = pack(Mine(), True)
    with pytest.raises(ArgumentError, match=r"rank 3 sent a pickle.*pass pickle=True here, too"):
        unpack(data, False, "rank 3")
    assert unpack(data, True, "rank 3") == Mine()


def every_call(comm):
    r, n = comm.rank, comm.world_size
    tell = {"rank": r, "x": np.full(r, r)}
    everybody = comm.all_gather_object(tell)
    gathered = comm.gather_object("x" * r, root=n - 1)
    comm.send_object(("to", (r + 1) % n), (r + 1) % n, 4)
    return [
        comm.broadcast_object(DATA if r == n - 1 else None, n - 1) == DATA,
        [(e["rank"], e["x"].tolist()) for e in everybody] == [(q, [q] * q) for q in range(n)],
        gathered == (["x" * q for q in range(n)] if r == n - 1 else None),
        comm.scatter_object([(q, "mine") for q in range(n)] if r == 0 else None) == (r, "mine"),
        comm.recv_object((r - 1) % n, 4) == ("to", r),
        comm.broadcast_object(Mine() if r == 0 else None, pickle=True) == Mine(),
    ]


@pytest.mark.parametrize(("run", "n"), [(run_threads, 1), (run_threads, 4), (run_processes, 3)])
def test_every_call(run, n):
    assert run(n, every_call) == [[True] * 6] * n


def refused(comm):
    r, seen = comm.rank, []
    for call in (
        lambda: comm.broadcast_object(Mine() if r == 0 else None),
        lambda: comm.all_gather_object(Mine() if r == 1 else 1),
        lambda: comm.gather_object(Mine() if r == 1 else 1),
        lambda: comm.scatter_object([1] if r == 0 else None),
        lambda: comm.broadcast_object(1, root=9),
    ):
        with pytest.raises((ArgumentError, PeerRejected)) as found:
            call()
        seen.append(type(found.value).__name__)
    return seen, comm.all_gather_object(r)


def test_one_that_cannot_be_sent_is_an_error_on_every_rank():
    peer = "PeerRejected"
    assert run_threads(2, refused) == [
        (["ArgumentError", peer, peer, "ArgumentError", "ArgumentError"], [0, 1]),
        ([peer, "ArgumentError", "ArgumentError", peer, "ArgumentError"], [0, 1]),
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_everybody_has_something_for_everybody(n):
    def ranks(comm):
        for size in (0, 100, 50_000):
            given = [(comm.rank, to, "x" * (size * to)) for to in range(n)]
            found = comm.all_to_all_object(given)
            assert found == [(at, comm.rank, "x" * (size * comm.rank)) for at in range(n)]
        return comm.all_to_all_object([Mine()] * n, pickle=True) == [Mine()] * n

    assert run_processes(n, ranks) == [True] * n


def test_lists_of_another_length_are_refused_everywhere():
    def ranks(comm):
        for wrong, text in (([1], "xs is 1 objects; every rank needs a list of 2"), ("ab", "'ab'")):
            mine = wrong if comm.rank == 0 else [1, 2]
            with pytest.raises(ArgumentError if comm.rank == 0 else PeerRejected, match=text):
                comm.all_to_all_object(mine)
        return comm.all_to_all_object([1, 2])

    assert run_threads(2, ranks) == [[1, 1], [2, 2]]


def test_bytes_are_no_objects():
    def ranks(comm):
        call, args = comm.all_to_all_v, (np.zeros(18, np.uint8), [9, 9])
        if comm.rank:
            call, args = comm.all_to_all_object, ([1, 2],)
        with pytest.raises(MismatchError, match=r"rank 0: all_to_all_v\(uint8") as error:
            call(*args)
        return "rank 1: all_to_all_object(" in str(error.value)

    assert run_threads(2, ranks) == [True, True]
