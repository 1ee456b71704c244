"""What a training step reports, how ranks compare, and files of scalars."""

from __future__ import annotations

import csv
import json
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError


@dataclass(frozen=True)
class StepReport:
    """The result of a training step.

    Attributes:
        loss: Mean loss over all samples of all ranks.
        samples: Number of samples of all ranks: of targets that count, so tokens for a GPT.
        grad_norm: Norm of the mean gradient, before clipping; the same on every mesh.
        skipped: Whether parameters were left alone because a gradient was not finite.
        loss_scale: Factor of the loss.
        bytes: Bytes that this rank sent, by purpose.
        waits: Seconds that this rank waited for communication, by purpose.
        peak_bytes: Largest memory of parameters, gradients, states and buffers during the step, and
            of activations if they are offloaded.
        seconds: Time of the step.
        own_samples: Number of samples of this rank; 0 in a pipeline.
        bucket_waits: Of `waits`, seconds for the gradients of each bucket, by its first parameter.
        peaks: Largest memory of each kind during the step: ``parameter``, ``gradient``, ...
        stored: Largest bytes of each kind in a file: ``optimizer``, ``activation``.
    """

    loss: float
    samples: int
    grad_norm: float
    skipped: bool
    loss_scale: float
    bytes: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    seconds: float = 0.0
    own_samples: int = 0
    bucket_waits: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Samples of all ranks per second; each token is one for a GPT."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that this rank waited for communication."""
        return sum(self.waits.values())

    def scalars(self, imbalance: dict[str, float] | None = None) -> dict[str, float]:
        """Return the figures of the step by name, for `Scalars`.

        Args:
            imbalance: What `imbalance` has returned on this rank, to have it among them.
        """
        found = {
            "loss": self.loss,
            "samples": self.samples,
            "grad_norm": self.grad_norm,
            "skipped": int(self.skipped),
            "loss_scale": self.loss_scale,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "waited_s": self.waited_s,
            "peak_bytes": self.peak_bytes,
            "process_peak_bytes": process_peak_bytes(),
        }
        parts = {
            "sent": self.bytes,
            "wait": self.waits,
            "bucket_wait": self.bucket_waits,
            "peak": self.peaks,
            "stored": self.stored,
            "imbalance": imbalance or {},
        }
        for name, part in parts.items():
            found |= {f"{name}/{key}": value for key, value in sorted(part.items())}
        return found

    def imbalance(self, comm: Communicator) -> dict[str, float]:
        """Compare the ranks of ``comm``; a collective of all of them.

        Returns:
            Largest value over the mean, for ``work`` (seconds that a rank did not wait),
            ``samples``, ``memory`` and ``bytes``; 1 is even.
        """
        sent = sum(self.bytes.values())
        own = [self.seconds - self.waited_s, self.own_samples, self.peak_bytes, sent]
        rows = comm.all_gather(np.array([own], np.float64))
        mean = np.maximum(rows.mean(axis=0), np.finfo(float).tiny)
        most = np.where(rows.max(axis=0) > 0, rows.max(axis=0) / mean, 1.0)
        return dict(zip(("work", "samples", "memory", "bytes"), most.tolist(), strict=True))


def process_peak_bytes() -> int:
    """Return the most memory that this process has used so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Scalars:
    """Writes figures of steps to a file, a line for each step; for one rank.

    ::

        with Scalars("run.csv") as scalars:
            for step, batch in enumerate(batches):
                scalars.add(step, engine.step(batch).scalars())

    Args:
        path: ``.csv`` or ``.jsonl``. An existing file is continued.

    Raises:
        ArgumentError: If the path ends otherwise, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if self._path.suffix not in (".csv", ".jsonl"):
            raise ArgumentError(f"scalars: {str(path)!r} ends neither in .csv nor in .jsonl")
        try:
            self._columns = self._known_columns()
            self._file: IO[str] = open(self._path, "a", encoding="utf-8", newline="")
        except OSError as error:
            raise ArgumentError(f"cannot write {str(path)!r}: {error}") from None

    def _known_columns(self) -> list[str]:
        if self._path.suffix != ".csv" or not self._path.exists():
            return []
        with open(self._path, encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])

    def add(self, step: int, figures: dict[str, Any]) -> None:
        """Write ``figures`` of ``step`` at once, so that it can be read while the program runs.

        A figure that is new, such as the first average of local SGD, gets a column of its own.
        """
        row = {"step": step} | figures
        if self._path.suffix == ".jsonl":
            self._file.write(json.dumps(row) + "\n")
        else:
            if not self._columns:
                self._columns = list(row)
                csv.DictWriter(self._file, self._columns).writeheader()
            elif fresh := [name for name in row if name not in self._columns]:
                self._widen(fresh)
            csv.DictWriter(self._file, self._columns, restval="").writerow(row)
        self._file.flush()

    def _widen(self, names: list[str]) -> None:
        """Write the file anew, with more columns."""
        self._file.close()
        with open(self._path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self._columns += names
        fresh = self._path.with_name(self._path.name + ".new")
        with open(fresh, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        fresh.replace(self._path)
        self._file = open(self._path, "a", encoding="utf-8", newline="")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
