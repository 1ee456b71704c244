"""Joining a job: from what the launcher has left behind to a communicator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pycoll.comm import Communicator
from pycoll.config import Config, Launch, environment
from pycoll.errors import ArgumentError, CollError, CollTimeout
from pycoll.runtime.selection.measured_choices import agree
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.shared_use import joined, valid
from pycoll.runtime.startup.bootstrap import Place, discover, launched_by_us, mark_joined
from pycoll.runtime.startup.make_groups import decline
from pycoll.runtime.startup.meeting import Link
from pycoll.runtime.startup.one_host import take_place

if TYPE_CHECKING:
    from pycoll.cuda.calls.virtual import VirtualRanks


def init(
    *,
    timeout: float | None = None,
    heap_bytes: int | None = None,
    cell_bytes: int | None = None,
    transport: str | None = None,
    device_transport: str | None = None,
    device_heap_bytes: int | None = None,
    single_copy: str | None = None,
    symmetric: str | None = None,
    strict: str | None = None,
    tuning: str | os.PathLike[str] | None = None,
) -> Communicator:
    """Join the job of this process and return its communicator.

    Under ``pycoll run -n N``, an MPI launcher, torchrun or Slurm this is a collective of N ranks; a
    process started alone is one rank. `Communicator.grow` takes in newcomers of elastic jobs. What
    is left out comes from ``PYCOLL_HEAP_BYTES=64G`` and the like. While that communicator is open,
    another call, of the program or a library, returns another object for it, and is no collective.
    It closes with the last of them, or when an exception leaves a ``with``. See `Communicator.dup`.

    Args:
        timeout: Seconds until a call, or this, raises `CollTimeout`: ``PYCOLL_TIMEOUT`` or 300.
        heap_bytes: Capacity of this rank's symmetric heap, 16 GiB by default; only arrays use it.
        cell_bytes: Staging memory for one iteration of a rank, 512 KiB by default.
        transport: ``auto`` (shared memory on a host, MPI between hosts) or ``mpi`` (for all).
        device_transport: For arrays on CUDA devices: ``cuda``, ``nccl`` or ``auto``.
        device_heap_bytes: Capacity of this rank's symmetric device heap, 1 GiB by default.
        single_copy: ``auto`` or ``off``: whether ranks may read each other's ordinary arrays.
        symmetric: ``off``, or ``numpy``: NumPy's arrays go to symmetric memory; docs/memory.md.
        strict: ``call``, or ``next``: over messages ranks may leave calls early; docs/mpi.md.
        tuning: Rank 0's table of measured times: ``auto`` (of ``pycoll tune``), ``off``, or a path.

    Raises:
        TransportError, PeerLeft: If the process, or another rank, cannot join; says why.
        ArgumentError: If a setting is not usable, or not that of others, or of before.
    """
    session = _session(
        timeout_s=timeout,
        heap_bytes=heap_bytes,
        cell_bytes=cell_bytes,
        transport=transport,
        device_transport=device_transport,
        device_heap_bytes=device_heap_bytes,
        single_copy=single_copy,
        symmetric=symmetric,
        strict=strict,
        tuning=tuning,
    )
    return Communicator(session)


def _session(**given: Any) -> Session:
    """Return what this process has joined before, or join with these settings."""
    session = joined().session
    if session is not None:
        joined().check(_configure(lambda: joined().config, given))
        return session
    launched = _launched()  # the variables that say so are taken away
    session, config = _join(_configure(Config.from_env, given))
    return joined().remember(session, config, once=launched)


def _join(config: Config | ArgumentError) -> tuple[Session, Config]:
    """Join the job, by whatever has started it; return the settings, too, which are valid then."""
    session = None if _launched() else _join_elsewhere(config)
    if session is not None:
        return session, valid(config)
    usable = _usable(config)
    return _join_host(usable), usable


def _launched() -> bool:
    """Tell whether ``pycoll run`` has started this process, and it has not joined yet."""
    return launched_by_us() or joined().link is not None


def _join_elsewhere(config: Config | ArgumentError) -> Session | None:
    """Join the job of an MPI launcher, torchrun or Slurm; return None if there is none."""
    from pycoll.runtime.startup import mpi  # takes long to import, as does `tcp_job`

    place = Place.from_env(environment())
    if place is not None and not mpi.serves(place.size):
        from pycoll.runtime.startup import tcp_job

        place.take(environment())
        return agree(tcp_job.join(place, config))
    comm = mpi.world()
    return None if comm is None else agree(mpi.connect(comm, config))


def _usable(config: Config | ArgumentError) -> Config:
    """Return the settings, if ranks that share a host can use them; otherwise all ranks hear it."""
    if isinstance(config, Config):
        if config.transport != "mpi" or not _launched():
            return config
        text = "transport='mpi': start the ranks with mpiexec, not with `pycoll run`"
        config = ArgumentError(text)
    _give_up_place(config)
    raise config


def _give_up_place(error: ArgumentError) -> None:
    """Tell the peers, if there are any, that this process cannot join them, and why."""
    with contextlib.suppress(CollError):  # without a place there is nobody to tell
        launch = Launch.from_env(environment())
        if launch is None or launch.world_size == 1:
            return
        launch = discover()
        decline(launch, error)
        os.close(launch.control_fd)
        os.close(launch.heap_fd)


def _join_host(config: Config) -> Session:
    """Join the ranks that `pycoll run` has started on this host, or be a world of one."""
    link = joined().link or Link.from_env(environment())
    if link is not None:
        mark_joined(environment())
        joined().link = None
        try:
            return link.meet(partial(take_place, config=config), config.timeout_s)
        except CollTimeout:
            joined().link = link  # it can be tried again
            raise
        except BaseException:
            link.close()
            raise
    launch = discover()
    try:
        return take_place(launch, config)
    finally:
        os.close(launch.control_fd)
        os.close(launch.heap_fd)


def from_mpi(
    comm: Any,
    *,
    timeout: float | None = None,
    transport: str | None = None,
    strict: str | None = None,
    tuning: str | os.PathLike[str] | None = None,
) -> Communicator:
    """Return a communicator of the ranks of an mpi4py communicator; a collective of all of them.

    Args:
        comm: Any intra-communicator, such as ``MPI.COMM_WORLD.Split(color)``. It is duplicated, so
            its own traffic is not touched.
        timeout: See `init`.
        transport: See `init`.
        strict: See `init`.
        tuning: See `init`.

    Raises:
        ArgumentError: If ``comm`` is something else, or ranks have different settings.
        CollTimeout: If other ranks have not called this within the time limit.
        TransportError: If MPI cannot be used.
    """
    from pycoll.runtime.startup import mpi

    given = dict(timeout_s=timeout, transport=transport, strict=strict, tuning=tuning)
    config = _configure(Config.from_env, given)
    return Communicator(agree(mpi.connect(comm, config)))


def virtual_ranks(n: int, device: int = 0) -> VirtualRanks:
    """Return n ranks that live on one CUDA device, in one process.

    Args:
        n: Number of ranks, 1 to 64.
        device: Number of the device.

    Raises:
        CudaUnavailable: If there is no such device; the text says what is missing.
    """
    from pycoll.cuda.calls.virtual import VirtualRanks

    return VirtualRanks(n, device)


def _configure(base: Callable[[], Config], given: dict[str, Any]) -> Config | ArgumentError:
    """Return the settings, or what is wrong with them: under MPI all ranks have to hear of that."""
    wanted = {k: v for k, v in given.items() if v is not None}
    try:
        if "tuning" in wanted:
            wanted["tuning"] = os.fspath(wanted["tuning"])
        return replace(base(), **wanted)
    except ArgumentError as error:
        return error
    except TypeError as error:
        return ArgumentError(f"tuning={given['tuning']!r}: {error}")
