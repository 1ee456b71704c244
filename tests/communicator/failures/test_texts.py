"""Texts of the program that reach other ranks: of exceptions, reasons, and names of files."""

import threading

import numpy as np
import pytest

from pycoll.errors import CollTimeout, MismatchError, PeerLeft, PeerRejected, Revoked
from pycoll.runtime.sessions.reports import each_says
from pycoll.testing import run_threads

X = np.ones(10)


class _Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


TEXTS = {
    "no text": (_Odd, "_Odd: (no text, for its __str__ raised RuntimeError)"),
    "a name of a file that is no UTF-8": (lambda: OSError("caf\udce9"), r"OSError: caf\udce9"),
    "nothing": (MemoryError, "MemoryError."),
}


@pytest.mark.parametrize("text", TEXTS)
def test_any_exception_reaches_the_peers(run, text):
    make, told = TEXTS[text]

    class Array:
        @property
        def __array_interface__(self):
            raise make()

    def rank(comm):
        twin, third = comm.dup(), comm.dup()
        if comm.rank == 0:
            with pytest.raises(type(make())):
                comm.all_reduce(Array())
            with pytest.raises(type(make())), twin:
                raise make()
            third.abort("caf\udce9")
        else:
            with pytest.raises(PeerRejected) as refused:
                comm.all_reduce(X)
            with pytest.raises(PeerLeft) as left:
                twin.barrier()
            with pytest.raises(Revoked, match="udce9"):
                third.barrier()
            assert told.rstrip(".") in str(refused.value)
            assert told in str(left.value)
        return float(comm.all_reduce(X)[0])

    assert run(2, rank) == [2.0, 2.0]


@pytest.mark.parametrize("name", ["pycollage", None])
def test_call_sites_in_modules_of_any_name_and_file(name):
    code = compile("comm.all_reduce(x)", "caf\udce9.py", "exec")

    def rank(comm):
        with pytest.raises(MismatchError) as caught:
            exec(code, {"__name__": name, "comm": comm, "x": np.ones(3 + comm.rank)})
        return str(caught.value).count(r" at caf\udce9.py:1 <module>()")

    assert run_threads(2, rank) == [2, 2]


def test_many_ranks_that_do_the_same_share_a_line():
    """So that the one that differs is not lost among hundreds."""
    n, over = 20, threading.Barrier(20)

    def ranks(comm):
        text = ""
        comm.barrier()
        if comm.rank not in (5, 11):
            with pytest.raises(CollTimeout) as caught:
                comm.barrier(timeout=3)
            text = str(caught.value)
        over.wait(30)
        return text

    for text in filter(None, run_threads(n, ranks)):
        first, odd, *rest = text.splitlines()
        assert "gave up after waiting 3" in first
        assert odd.startswith("  each of ranks 5, 11: has not made this call")
        assert len(rest) < n / 2
        assert any(line.startswith("  each of ranks 0-4, 6-10") for line in rest)


def test_of_few_ranks_each_has_a_line():
    said = {rank: "same" for rank in range(16)}
    assert each_says(said) == [f"  rank {rank}: same" for rank in range(16)]
    assert each_says({**said, 16: "other"}) == ["  rank 16: other", "  each of ranks 0-15: same"]
