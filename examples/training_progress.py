"""What ``train_gpt.py`` shows while it trains, and the picture it draws."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from pycoll.parallel import StepReport

if TYPE_CHECKING:
    from train_gpt import Trainer


def number(nbytes: float) -> str:
    """Write a number of bytes with three digits."""
    power = min(3, int(math.log(nbytes, 1000))) if nbytes else 0
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


class Progress:
    """What rank 0 shows while training, and remembers for the picture."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.losses: list[float] = []
        self.tests: list[tuple[int, float]] = []
        self.sent, self.all_sent = Counter[str](), Counter[str]()
        self.waits = self.seconds = self.all_seconds = 0.0

    def add(self, step: int, report: StepReport, sent: Counter[str], waited: float) -> None:
        """Take the figures of a step; every so often say them. A collective."""
        args, comm = self.trainer.args, self.trainer.comm
        self.losses.append(report.loss)
        self.sent, self.waits = self.sent + sent, self.waits + waited
        self.seconds += report.seconds
        live = comm.rank == 0 and sys.stdout.isatty()
        if live:
            text = f"{self.head(step, report.loss)}  {self.bar(step)}"
            print(f"\r{text}\x1b[K", end="", flush=True)
        if (step + 1) % args.every and step + 1 < args.steps:
            return
        shares = comm.all_gather(np.array([[self.waits / self.seconds]]))[:, 0]
        if comm.rank == 0:
            done = len(self.losses) % args.every or args.every
            speed = done * args.batch * args.length / self.seconds
            moved = "  ".join(f"{p} {number(n / done)}" for p, n in sorted(self.sent.items()))
            waits = " ".join(f"{share:.0%}" for share in shares)
            print(
                f"{chr(13) if live else ''}{self.head(step, report.loss)}  {speed:7,.0f} tokens/s  "
                f"sent/step: {moved or 'nothing'}  waiting: {waits}",
                flush=True,
            )
        self.all_sent += self.sent
        self.all_seconds += self.seconds
        self.sent, self.waits, self.seconds = Counter(), 0.0, 0.0

    def head(self, step: int, loss: float) -> str:
        return f"step {step + 1:5}/{self.trainer.args.steps}  loss {loss:.4f}"

    def bar(self, step: int, width: int = 24) -> str:
        """Draw how far it is, and when it will be over."""
        steps = self.trainer.args.steps
        done = width * (step + 1) // steps
        left = round((self.all_seconds + self.seconds) / len(self.losses) * (steps - step - 1))
        hours, rest = divmod(left, 3600)
        return f"[{'#' * done}{'.' * (width - done)}] {hours}:{rest // 60:02}:{rest % 60:02} left"

    def test(self, loss: float) -> None:
        self.tests.append((len(self.losses), loss))
        if self.trainer.comm.rank == 0:
            print(f"{'held-out text':17} loss {loss:.4f}", flush=True)


def plot(path: str, progress: Progress, baselines: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args, steps = progress.trainer.args, np.arange(len(progress.losses)) + 1
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.8), layout="constrained", width_ratios=(3, 1)
    )
    left.plot(steps, progress.losses, color="0.75", lw=1, label="training batch")
    left.plot(*zip(*progress.tests, strict=True), "o-", ms=4, label="held-out text")
    for (name, loss), style in zip(baselines.items(), ("--", ":"), strict=True):
        left.axhline(loss, color="C3", ls=style, lw=1.2, label=f"{name}: {loss:.3f}")
    mesh = " x ".join(f"{axis} {size}" for axis, size in progress.trainer.mesh.axes.items())
    left.set(xlabel="step", ylabel="loss, nats per byte", ylim=(1, 4))
    left.set(title=f"GPT of {args.depth} layers, {args.features} wide, {mesh}, ZeRO {args.zero}")
    left.legend()
    left.grid(alpha=0.3)
    sent = sorted(progress.all_sent.items(), key=lambda item: item[1]) or [("nothing", 0)]
    shown = [(name, nbytes / len(steps)) for name, nbytes in sent if nbytes * 1000 >= sent[-1][1]]
    bars = right.barh([name for name, _ in shown], [nbytes for _, nbytes in shown], height=0.5)
    right.bar_label(bars, [number(nbytes) for _, nbytes in shown], padding=3)
    right.set(
        title="Sent by a rank, each step",
        xticks=[],
        ylim=(min(len(shown), 4) - 4.6, len(shown) - 0.4),
    )
    right.margins(x=0.35)
    right.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=120)
