"""Texts of the program that reach other ranks: of exceptions, reasons, and names of files."""

import numpy as np
import pytest

from pycoll.errors import MismatchError, PeerLeft, PeerRejected, Revoked
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
