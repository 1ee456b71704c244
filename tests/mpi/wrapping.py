"""Programs that make communicators of mpi4py's: see programs.py."""

import contextlib

import numpy as np

import pycoll
from pycoll.runtime import mpi


def wrapped(comm):
    """Wrap sub-communicators of mpi4py."""
    from mpi4py import MPI  # not before: init must do without

    half = pycoll.from_mpi(MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank), transport="mpi")
    auto = pycoll.from_mpi(MPI.COMM_WORLD)
    sums = [float(c.all_reduce(np.ones(1))[0]) for c in (half, auto)]
    refused = True
    for wrong, said in (("no communicator", "'no communicator'"), (MPI.COMM_NULL, "was freed")):
        try:
            pycoll.from_mpi(wrong)
            refused = False
        except pycoll.ArgumentError as error:
            refused = refused and said in str(error)
    half.close()
    return [sums, refused, type(auto._session).__name__]


def wrapped_again(comm):
    """Wrap one communicator of MPI again and again; it is duplicated for messages once."""
    from mpi4py import MPI  # not before: init must do without

    world, made, wrong = MPI.COMM_WORLD.Dup(), [], []
    with recording(made):
        for i in range(40):
            with pycoll.from_mpi(world, transport="mpi") as again:
                half = again.split(again.rank % 2)
                sums = [float(c.all_reduce(np.full(5000, i))[-1]) for c in (again, half)]
                wrong += [(i, sums)] if sums != [i * c.world_size for c in (again, half)] else []
    return wrong, len(made)


@contextlib.contextmanager
def recording(made):
    """Note which duplicates of communicators of MPI are made."""

    def recorded(*given):
        made.append(duplicate(*given))
        return made[-1]

    duplicate, mpi._duplicate = mpi._duplicate, recorded
    yield
    mpi._duplicate = duplicate


def one_cannot_join(comm):
    """A rank that has no memory for its part: an error everywhere, and the next try succeeds."""
    from mpi4py import MPI  # not before: init must do without

    def fails(*given):
        raise MemoryError("none left")

    world, said, made, session = MPI.COMM_WORLD.Dup(), [], [], mpi.Session
    with recording(made):
        for transport in ("auto", "mpi"):
            if comm.rank == 1:
                mpi.Session = mpi.MpiSession = fails
            try:
                pycoll.from_mpi(world, transport=transport)
            except (MemoryError, pycoll.TransportError) as error:
                said.append(f"{type(error).__name__}: {error}")
            mpi.Session, mpi.MpiSession = session, type(comm._session)
            said.append([own == MPI.COMM_NULL for own in made])
            with pycoll.from_mpi(world, transport=transport) as after:
                said.append(float(after.all_reduce(np.ones(3))[0]))
    return said


ALL = (wrapped, wrapped_again, one_cannot_join)
