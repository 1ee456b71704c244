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
        peak_bytes: Largest memory of parameters, gradients, states and buffers during the step.
        seconds: Time of the step.
        own_samples: Number of samples of this rank; 0 in a pipeline.
        bucket_waits: Of `waits`, seconds for the gradients of each bucket, by its first parameter.
        peaks: Largest memory of each kind during the step: ``parameter``, ``gradient``, ...
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

    @property
    def tokens_per_s(self) -> float:
        """Samples of all ranks per second; each token is one for a GPT."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that this rank waited for communication."""
        return sum(self.waits.values())

    def scalars(self) -> dict[str, float]:
        """Return the figures of the step by name, for `Scalars`."""
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
        for name, part in (("sent", self.bytes), ("wait", self.waits), ("peak", self.peaks)):
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
        path: ``.csv`` (its columns are those of the first line) or ``.jsonl``. An existing file is
            continued.

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

        Raises:
            ArgumentError: If a CSV file has no column for a figure.
        """
        row = {"step": step} | figures
        if self._path.suffix == ".jsonl":
            self._file.write(json.dumps(row) + "\n")
        else:
            writer = csv.DictWriter(self._file, self._columns or list(row), restval="")
            if not self._columns:
                self._columns = list(row)
                writer.writeheader()
            if strange := sorted(set(row) - set(self._columns)):
                raise ArgumentError(f"scalars: {self._path} has no column {', '.join(strange)}")
            writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
