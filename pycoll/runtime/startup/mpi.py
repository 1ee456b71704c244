"""Start-up under MPI: from mpi4py's communicator to sessions.

Nothing here needs to know which MPI it is: mpi4py tells the few numbers that differ, and the engine
calls the library that mpi4py has loaded. `mpi4py` is imported only when a job runs under MPI.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pycoll import _C
from pycoll.config import Config, environment
from pycoll.errors import ArgumentError, TransportError, cut
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.selection.topology import Topology
from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
from pycoll.runtime.sessions.mpi_jobs import duplicate, find_job, free, jobs_of, library
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.two_level_session import NodeSession, TwoLevelSession
from pycoll.runtime.startup.bootstrap import launched_by_us, make_memfd
from pycoll.runtime.startup.hosts import (
    CARD_BYTES,
    Card,
    Exchange,
    Shared,
    candidates,
    fewest_cores,
    share,
)
from pycoll.runtime.startup.make_groups import open_control
from pycoll.runtime.startup.rendezvous import Rendezvous, make_everywhere

# Variables with the number of processes that MPI launchers start.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")  # of srun; a batch script has others
_HINT = "start it with the mpiexec of the MPI that mpi4py uses; `pycoll doctor` names it"
_SLURM_HINT = "start it with `srun --mpi=pmi2` or `--mpi=pmix`, whichever that MPI understands"


def launched_size(environ: Mapping[str, str]) -> int:
    """Return how many processes an MPI launcher has started; 0 if none has."""
    for name in _SIZES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    if all(name in environ for name in _SLURM) and environ[_SLURM[0]].isdigit():
        return int(environ[_SLURM[0]])
    return 0


def under_launcher() -> bool:
    """Tell whether this process is one of several ranks that a launcher has started."""
    return launched_by_us() or launched_size(environment()) > 1


def serves(size: int) -> bool:
    """Tell whether an MPI launcher has started so many processes, and mpi4py is there."""
    found = launched_size(environment()) == size
    return found and importlib.util.find_spec("mpi4py") is not None


def world(environ: Mapping[str, str] | None = None) -> Any:
    """Return mpi4py's ``COMM_WORLD`` if this process belongs to an MPI job of several ranks.

    Raises:
        TransportError: If mpi4py is missing, or belongs to another MPI than the launcher.
    """
    size = launched_size(environment() if environ is None else environ)
    loaded = sys.modules.get("mpi4py.MPI")
    if size <= 1 and loaded is None:
        return None
    if loaded is None:
        loaded = load()
    state = _unusable(loaded)
    if state and size <= 1:
        return None  # a program on its own, which has no use for MPI now
    if state:
        raise TransportError(f"an MPI launcher has started {size} processes, but {state}")
    comm = loaded.COMM_WORLD
    if comm.size == 1 and size > 1:
        hint = _SLURM_HINT if _SLURM[1] in environment() else _HINT
        raise TransportError(
            f"an MPI launcher has started {size} processes, but in this one mpi4py uses "
            f"{library(loaded)}, which knows of one: {hint}"
        )
    return comm if comm.size > 1 else None


def can_begin(size: int, nested: bool) -> bool:
    """Tell whether `world` would return on this rank, if all ranks of a group call it.

    MPI_Init waits without limit for every process that the launcher has started. So they have to be
    the ranks of the group, unless MPI is there already.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None:
        return not _unusable(loaded)
    fits = 1 < launched_size(environment()) == size and not nested
    return fits and importlib.util.find_spec("mpi4py") is not None


def _unusable(MPI: Any) -> str:
    """Say why MPI cannot be used now; empty if it can."""
    if not MPI.Is_initialized():
        return "MPI has not been initialised in this process: MPI.Init() comes first"
    return "MPI has been finalized in this process" if MPI.Is_finalized() else ""


def load() -> Any:
    """Import ``mpi4py.MPI``.

    Raises:
        TransportError: If it is missing or cannot load its library.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise TransportError(
            f"this process was started by an MPI launcher, but mpi4py cannot be imported: {error}. "
            "Install it with: pip install mpi4py"
        ) from error
    except RuntimeError as error:
        raise TransportError(f"mpi4py cannot load an MPI library: {error}") from error
    return MPI


def connect(
    comm: Any, config: Config | ArgumentError, hosts: Sequence[int] | None = None
) -> Session:
    """Make the session of this process's rank in an mpi4py communicator; a collective.

    Ranks that all share one host get shared memory, unless ``config.transport`` is ``"mpi"``. In
    place of a configuration may stand what is wrong with it, which then is raised on every rank.
    ``hosts`` is for tests: see `pycoll.testing.on_hosts`.

    Raises:
        ArgumentError: If ``comm`` is no intra-communicator, or settings differ between ranks.
        CollTimeout: If some ranks have not come within the time limit of calls.
        TransportError: If MPI or the memory cannot be used.
    """
    MPI = load()
    if _unusable(MPI):
        raise TransportError(_unusable(MPI))
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        null = isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL
        given = (
            "MPI.COMM_NULL: it was freed, or this process is in no group" if null else repr(comm)
        )
        raise ArgumentError(f"from_mpi takes an intra-communicator of mpi4py, not {given}")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise TransportError("this MPI may be used by the main thread only; call init there")
    limit = config.timeout_s if isinstance(config, Config) else Config.timeout_s
    try:
        Rendezvous(MPI, comm, limit, begun=False).await_all()
        return _connect(MPI, comm, config, limit, hosts)
    except MPI.Exception as error:
        raise TransportError(f"start-up over {library(MPI)} failed: {error}") from error


def _connect(
    MPI: Any,
    comm: Any,
    config: Config | ArgumentError,
    limit: float,
    hosts: Sequence[int] | None,
) -> Session:
    """Make the session by way of a communicator of our own."""
    jobs = jobs_of(MPI, comm)
    own = next((job.comm for job in jobs.values()), None) or duplicate(MPI, comm, limit)
    roll = Rendezvous(MPI, own, limit)
    try:
        session = _join(MPI, comm, own, _exchange(MPI, own, roll), config, hosts)
    except MPI.Exception:
        raise
    except BaseException:  # on every rank, unless they have lost each other
        if not roll.broken:
            free(own, jobs)
        raise
    free(own, jobs)
    return session


def _join(
    MPI: Any,
    comm: Any,
    own: Any,
    exchange: Exchange,
    config: Config | ArgumentError,
    hosts: Sequence[int] | None,
) -> Session:
    tell = lambda text: _texts(exchange(cut(text, CARD_BYTES).encode()))  # noqa: E731
    card = make_everywhere(Card.own, tell, undo=None)
    cards = [Card.unpack(row) for row in exchange(card.pack())]
    config = _agree_on(exchange, config)
    places = candidates(cards, hosts)
    if config.transport == "mpi":
        places = tuple(range(comm.size))
    if comm.size == 1:
        shared = Shared((0,), make_memfd("control"), make_memfd("heap"))
    else:
        shared = share(exchange, comm.rank, places, [card.pid for card in cards])
    job, context = None, 0
    try:
        if not shared.single:
            job = find_job(MPI, comm, own, cards, shared.hosts, tell, config.timeout_s)
            largest = lambda number: max(map(int, tell(f"{number}")))  # noqa: E731
            context = job.new_context(largest, comm.rank == 0)
        return make_everywhere(lambda: _make(job, context, comm.rank, cards, shared, config), tell)
    finally:  # the memory is open everywhere before anybody gives a descriptor back
        shared.close()


def _make(
    job: MpiJob | None,
    context: int,
    rank: int,
    cards: list[Card],
    shared: Shared,
    config: Config,
) -> Session:
    if job is None:
        return on_one_host(shared, rank, len(cards), config)
    return on_hosts(job, context, rank, cards, shared, config)


def on_one_host(
    shared: Shared, rank: int, n: int, config: Config, kind: type[Session] = Session
) -> Session:
    """Make the session of a rank in the memory of its host."""
    heap = raising(_C.Heap, shared.heap_fd, n, config.heap_bytes)
    control = open_control(shared.control_fd, n, config)
    return kind(control, Memory(heap, rank), rank, n, config)


def on_hosts(
    job: MpiJob,
    context: int,
    rank: int,
    cards: list[Card],
    shared: Shared,
    config: Config,
    kinds: tuple[type[MpiSession], type[TwoLevelSession]] = (MpiSession, TwoLevelSession),
) -> MpiSession:
    """Make the session of a rank of several hosts, of the second kind if two levels are of use."""
    place = job, list(range(len(cards))), rank, context, config
    topology = Topology(shared.hosts, rank, fewest_cores(cards, shared.hosts))
    if not topology.useful:
        return kinds[0](*place)
    return kinds[1](*place, _open_node(topology, shared, config), topology)


def _open_node(topology: Topology, shared: Shared, config: Config) -> Any:
    """Open the memory of this rank's host; a rank that is alone there makes its own."""
    mates = topology.mates
    place = mates.index(topology.rank), len(mates), config, NodeSession
    if len(mates) > 1:
        return on_one_host(shared, *place)
    own = Shared((0,), make_memfd("control"), make_memfd("heap"))
    try:
        return on_one_host(own, *place)
    finally:
        own.close()


def _exchange(MPI: Any, comm: Any, roll: Rendezvous) -> Exchange:
    def exchange(card: bytes) -> list[bytes]:
        if len(card) > CARD_BYTES:
            raise TransportError(f"{len(card)} bytes of start-up data, at most {CARD_BYTES}")
        mine = np.frombuffer(card.ljust(CARD_BYTES, b"\0"), np.uint8)
        table = np.empty((comm.size, CARD_BYTES), np.uint8)
        pieces = [mine, MPI.BYTE], [table, MPI.BYTE]
        roll.finish(lambda: comm.Iallgather(*pieces), mine, table)
        return [row.tobytes() for row in table]

    return exchange


def _texts(rows: list[bytes]) -> list[str]:
    return [row.rstrip(b"\0").decode(errors="ignore") for row in rows]


def _agree_on(exchange: Exchange, config: Config | ArgumentError) -> Config:
    """Return the settings if all ranks have the same, and none of them is wrong."""
    own = f"!{config}" if isinstance(config, ArgumentError) else repr(config)
    texts = _texts(exchange(cut(own, CARD_BYTES).encode()))
    bad = [f"rank {r}: {text[1:]}" for r, text in enumerate(texts) if text.startswith("!")]
    if bad or isinstance(config, ArgumentError):
        raise ArgumentError("; ".join(bad))
    if len(set(texts)) > 1:
        raise ArgumentError(f"ranks have different settings: {'; '.join(sorted(set(texts)))}")
    return config
