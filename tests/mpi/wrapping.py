"""Programs that make communicators of mpi4py's: see programs.py."""

import contextlib
import os
import resource
import time

import numpy as np

import pycoll
from pycoll.runtime.sessions import mpi_jobs
from pycoll.runtime.startup import mpi


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

    duplicate, mpi.duplicate = mpi.duplicate, recorded
    yield
    mpi.duplicate = duplicate


def one_cannot_join(comm):
    """A rank that has no memory for its part: an error everywhere, and the next try succeeds."""
    from mpi4py import MPI  # not before: init must do without

    def fails(*given):
        raise MemoryError("none left")

    world, said, made, make = MPI.COMM_WORLD.Dup(), [], [], mpi._make
    with recording(made):
        for transport in ("auto", "mpi"):
            if comm.rank == 1:
                mpi._make = fails
            try:
                pycoll.from_mpi(world, transport=transport)
            except (MemoryError, pycoll.TransportError) as error:
                said.append(f"{type(error).__name__}: {error}")
            mpi._make = make
            said.append([own == MPI.COMM_NULL for own in made])
            with pycoll.from_mpi(world, transport=transport) as after:
                said.append(float(after.all_reduce(np.ones(3))[0]))
    return said


def one_has_no_way(comm):
    """A rank that cannot describe MPI to the engine: as `one_cannot_join`, by an earlier step."""
    from mpi4py import MPI  # not before: init must do without

    def fails(*given):
        raise MemoryError("none left")

    world, said, made, make_job = MPI.COMM_WORLD.Dup(), [], [], mpi_jobs.make_job
    with recording(made):
        if comm.rank == 1:
            mpi_jobs.make_job = fails
        for _ in range(2):
            try:
                pycoll.from_mpi(world, transport="mpi")
            except (MemoryError, pycoll.TransportError) as error:
                said.append(f"{type(error).__name__}: {error}")
        mpi_jobs.make_job = make_job
        with pycoll.from_mpi(world, transport="mpi") as after:
            said.append(float(after.all_reduce(np.ones(3))[0]))
        said.append([own == MPI.COMM_NULL for own in made])
    return said


def one_has_no_descriptors(comm):
    """The rank that makes the memory of all may open no more files."""
    from mpi4py import MPI  # not before: init must do without

    world, said = MPI.COMM_WORLD.Dup(), []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    for left in (0, 1, 2):
        if comm.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
        try:
            pycoll.from_mpi(world)
        except pycoll.TransportError as error:
            said.append(str(error))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pycoll.from_mpi(world) as after:
        said.append(float(after.all_reduce(np.ones(3))[0]))
    again = os.dup(0)
    os.close(again)
    return [*said, again == free]


def own_messages(comm):
    """Messages of the user are under way on the communicator, with tags that are special."""
    from mpi4py import MPI  # not before: init must do without

    world, (rank, n) = MPI.COMM_WORLD.Dup(), (comm.rank, comm.world_size)
    left, right = (rank - 1) % n, (rank + 1) % n
    tags = [world.Get_attr(MPI.TAG_UB) or MPI.COMM_WORLD.Get_attr(MPI.TAG_UB), 30_007, 0]
    nothing = [None, 0, MPI.BYTE]
    sent = [world.isend(f"hello from {rank}", right, tag) for tag in tags]
    sent += [world.Isend(nothing, right, tag) for tag in tags]
    time.sleep(0.2 * rank)
    with pycoll.from_mpi(world, timeout=10) as made:
        total = float(made.all_reduce(np.ones(1))[0])
    got = [world.recv(source=left, tag=tag) for tag in tags]
    for tag in tags:
        world.Recv(nothing, left, tag)
    MPI.Request.Waitall(sent)
    return [total, got == [f"hello from {left}"] * 3]


ALL = (
    wrapped,
    wrapped_again,
    one_cannot_join,
    one_has_no_way,
    one_has_no_descriptors,
    own_messages,
)
