"""The worker's end: gradients go out bucket by bucket, parameters come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pycoll import kernels
from pycoll.comm import Communicator, Work
from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Ledger, Pending
from pycoll.parallel.nn.losses import sum_and_count
from pycoll.parallel.optim import UpdateArgs
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Layout

HEAD = 0
"""Tag of what a worker says before it pushes, ``[samples, lr]``. Bucket b has the tag b + 1."""
END = -1.0
"""In place of samples: the worker has pushed all that it will."""


class Lines(NamedTuple):
    """How a worker reaches the servers.

    Attributes:
        comm: Workers and servers.
        owners: Rank of the server of each bucket.
    """

    comm: Communicator
    owners: list[int]

    @property
    def servers(self) -> list[int]:
        """Ranks of the servers."""
        return sorted(set(self.owners))


class Worker:
    """Sends gradients and receives parameters.

    Every push of a bucket has one answer: the parameters of the bucket. The next one is pushed when
    the answer has come, so at most one message of a bucket is under way in each direction.

    Attributes:
        steps: Steps that all servers have.
    """

    def __init__(self, buckets: Sequence[Bucket], ledger: Ledger) -> None:
        self._buckets, self._ledger = buckets, ledger
        self._works: list[Work] = []
        self._expected: list[int] = []
        self._announced = False
        self.lines: Lines
        self.steps: int = 0

    def begin(self, lines: Lines) -> None:
        """Expect the parameters of all buckets, which servers send of their own accord."""
        self.lines, self._works, self._announced = lines, [], False
        self._expected = list(range(len(self._buckets)))

    @property
    def torn(self) -> bool:
        """Whether a step was begun and not ended, so that servers wait for the rest of it."""
        return self._announced

    def settle(self) -> None:
        """Wait for what servers owe: the newest parameters of what was pushed."""
        with self._ledger.waiting("parameter"):
            while self._expected:
                b = self._expected[0]
                data = self._buckets[b].parameter.data
                self.lines.comm.recv(data, self.lines.owners[b], b + 1)
                del self._expected[0]
            for work in self._works:
                work.wait()
        self._works = []

    def announce(self, samples: float, lr: float) -> None:
        """Tell all servers what they will get, unless they know."""
        if not self._announced:
            head = np.array([samples, lr])
            self._works += [self.lines.comm.isend(head, s, HEAD) for s in self.lines.servers]
            self._announced = True

    def push(self, b: int, gradient: np.ndarray) -> None:
        """Start to send the gradient of a bucket, which has to stay as it is until `settle`."""
        self._works.append(self.lines.comm.isend(gradient, self.lines.owners[b], b + 1))
        self._ledger.wire["gradient", "server"] += gradient.nbytes
        self._expected.append(b)

    def end_step(self) -> None:
        """Note that all buckets have been pushed."""
        self._announced = False
        self.steps += 1

    def end(self) -> None:
        """Tell all servers that nothing more comes, and wait until all workers have said so."""
        self.settle()
        self.announce(END, math.nan)
        bye = np.empty(1)
        for server in self.lines.servers:
            self.lines.comm.recv(bye, server, HEAD)


class Counted:
    """A loss that counts samples, and refuses a sum that is not finite before anything is sent.

    Attributes:
        samples: Samples of this step so far.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.samples: int = 0

    def forward(self, logits: Any, targets: Any) -> tuple[float, int, Any]:
        """Return the sum of the losses, the number of samples, and what `backward` needs."""
        total, count, saved = self._loss.forward(logits, targets)
        return self.note(total, count), count, saved

    def backward(self, saved: Any, scale: float) -> Any:
        """Return the gradient of the logits."""
        return self._loss.backward(saved, scale)

    def __call__(self, output: Any, targets: Any) -> tuple[Any, int]:
        """Return the sum of the losses of a PyTorch module, and the number of samples."""
        total, count = sum_and_count(self._loss(output, targets))
        self.note(total.item(), count)
        return total, count

    def note(self, total: float, count: int) -> float:
        """Count the samples of a micro-batch; return the sum of its losses."""
        if not math.isfinite(total):
            raise ArgumentError(f"the loss is {total}: nothing of this step was pushed")
        self.samples += int(count)
        return total


class Pushing(Hook):
    """Sends each bucket as soon as it is complete, while the backward pass goes on."""

    def __init__(self, loss: Counted) -> None:
        self._loss, self._numbers = loss, dict[str, int]()
        self.worker: Worker
        self.lr: float = math.nan

    def connect(self, worker: Worker, buckets: Sequence[Bucket]) -> None:
        """Take the buckets of the engine that it serves."""
        self.worker = worker
        names = (bucket.layout.entries[0].parameter.name for bucket in buckets)
        self._numbers = {name: b for b, name in enumerate(names)}

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Push a bucket; see `Hook.all_reduce`."""
        check_finite(data, layout)
        self.worker.announce(self._loss.samples, self.lr)
        self.worker.push(self._numbers[key], data)
        return Pending(None, data, channel.ledger, "gradient")


class Remote:
    """Stands for the optimizer in the engine of a worker: the servers have the real one."""

    slots: tuple[str, ...] = ()

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def update(self, args: UpdateArgs, fused: bool = True) -> None:
        """Leave the parameters alone."""


def check_finite(data: np.ndarray, layout: Layout) -> None:
    """Refuse a gradient with infinities or NaNs, naming parameters."""
    if kernels.count_nonfinite(data):
        names = [
            entry.parameter.name
            for entry in layout.entries
            if kernels.count_nonfinite(data[entry.start : entry.stop])
        ]
        raise ArgumentError(f"the gradient of {', '.join(names)} is not finite")
