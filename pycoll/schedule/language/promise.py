"""What a schedule must keep, as arrays: who holds which chunk, which input each output wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN


@dataclass(frozen=True)
class Promise:
    """The promise of a collective for one schedule; `collectives` defines it in words."""

    # n, chunks: world size and number of chunks
    n: int
    chunks: int
    alike: int  # chunks that are so far apart are equally long, whatever the size of the vector
    reduces: bool  # every output wants the contributions of ranks to its chunk, each once
    sources: np.ndarray  # ``[n]`` of how many ranks, from rank 0 on, a rank's outputs want them
    # in_held, out_held: ``[n, chunks]`` whether the rank's IN (OUT) holds the chunk
    in_held: np.ndarray
    out_held: np.ndarray
    # ``[n, chunks]`` number of the input, ``rank * chunks + chunk``, that an output wants when
    # nothing is reduced
    origin: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> Promise:
        """Lay the promise of a schedule's collective out.

        Raises:
            ScheduleError: If the chunks cannot be shared out evenly, or the root does not exist.
        """
        spec, n, chunks, root = (
            COLLECTIVES[schedule.collective],
            schedule.n,
            schedule.chunks,
            schedule.root,
        )
        owned = check_sizes(schedule)
        rank, chunk = np.indices((n, chunks))
        share = max(1, chunks // n)
        own = chunk // share == rank
        at_root = rank == root
        sources = np.array([spec.sources(r, n) for r in range(n)])
        gets = (at_root | (not spec.out_at_root)) & (sources[rank] > 0)
        full = np.ones((n, chunks), bool)
        if spec.transposes:
            source, source_chunk = chunk // share, rank * share + chunk % share
        else:
            source, source_chunk = root if spec.in_at_root else chunk // share, chunk
        return cls(
            n=n,
            chunks=chunks,
            alike=share if owned else chunks,
            reduces=spec.reduces,
            sources=sources,
            in_held=(own if spec.in_layout == OWN else full) & (at_root | (not spec.in_at_root)),
            out_held=(own if spec.out_layout == OWN else full) & gets,
            origin=source * chunks + source_chunk,
        )


def check_sizes(schedule: Schedule) -> bool:
    """Refuse what `Promise.of` would; return whether ranks own equal shares of the vector."""
    spec, n, chunks = COLLECTIVES[schedule.collective], schedule.n, schedule.chunks
    owned = spec.transposes or OWN in (spec.in_layout, spec.out_layout)
    if chunks < 1 or (owned and chunks % n):
        raise ScheduleError(f"{schedule}: {chunks} chunks cannot be shared among {n} ranks")
    if not 0 <= schedule.root < n:
        raise ScheduleError(f"{schedule}: there is no rank {schedule.root} to be the root")
    return owned
