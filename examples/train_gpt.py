"""Train a byte-level GPT on the source of Python's library: on any mesh, the same model.

    pycoll run -n 4 examples/train_gpt.py --mesh dp=2,tp=2 --zero 3 --plot loss.png
    pycoll run -n 4 examples/train_gpt.py --mesh dp=2,pp=2 --micro-batches 4 --schedule zb_h1
    pycoll run -n 4 --elastic examples/train_gpt.py --elastic --zero 2 --save run/

Weights, batches and dropout depend on global positions only, so that a run on another mesh trains
the same model; with ``--order tree``, to the same bits for all ways to divide the micro-batches
among a power of two of ranks. The last line has a digest of the parameters. With ``--elastic`` it
goes on when ranks are killed, and takes in those that the launcher starts in their place.
"""

import argparse
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import python_text
import training_progress
from threadpoolctl import threadpool_limits

import pycoll
from pycoll.parallel import (
    AdamW,
    DataParallel,
    Elastic,
    Ledger,
    Mesh,
    Pipeline,
    StepReport,
    WarmupCosine,
    load,
    save,
)
from pycoll.parallel.channels import Metered
from pycoll.parallel.context.split import KINDS, Context
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.random import Cursor, Key, integers

Take = Callable[[np.ndarray], np.ndarray]
Rows = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
Taken = tuple[int, StepReport, Counter[str], float]
PRECISION = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
EVAL_WINDOWS, EVAL_CHUNK, ORDERS = 256, 16, (3, 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT.")
    add = parser.add_argument
    add(
        "--mesh",
        type=axes,
        default="dp=-1",
        help="axes, such as dp=2,tp=2 or replica=2,dp=2,cp=1,pp=2 (all dp)",
    )
    add("--zero", type=int, default=0, choices=range(4), help="ZeRO stage (0)")
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=16, help="windows of text in a step, over all ranks (16)")
    add("--micro-batches", type=int, default=1, help="parts that each rank's share is cut into (1)")
    add(
        "--elastic",
        type=int,
        nargs="?",
        const=8,
        metavar="PARTS",
        help="go on when ranks die or come; PARTS is into how many the batch is cut (8)",
    )
    add("--save", metavar="FOLDER", help="of checkpoints; goes on from the newest one there")
    add("--save-every", type=int, default=100, metavar="N", help="steps between two of them (100)")
    add("--dtype", default="float32", choices=PRECISION, help="type of the parameters")
    add("--array", default="numpy", choices=("numpy", "torch", "cupy"), help="library")
    add("--order", default="tree", choices=("tree", "rank", "any"), help="order of sums over ranks")
    add("--schedule", default="1f1b", help="of the stages, if the mesh has an axis pp (1f1b)")
    add("--recompute", default="none", type=recompute, help="none, full, selective or a number")
    add("--offload", default="none", choices=("none", "activations", "optimizer", "all"))
    add("--context", default="zigzag", choices=KINDS, help="attention over the axis cp (zigzag)")
    add("--sequence-parallel", action="store_true", help="divide the sequence over tp as well")
    add("--dropout", type=float, default=0.0)
    add("--tied", action="store_true", help="the head is the table of the embedding")
    add("--lr", type=float, default=4e-3)
    add("--seed", type=int, default=0)
    add("--depth", type=int, default=4)
    add("--features", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=128)
    add("--text-bytes", type=int, metavar="N", help="use only the first N bytes of the text")
    add("--every", type=int, default=10, help="steps between two lines (10)")
    add("--plot", metavar="FILE", help="draw losses and traffic")
    args = parser.parse_args()
    if args.text_bytes is not None and args.text_bytes <= args.length:
        parser.error(f"--text-bytes {args.text_bytes}: more than --length {args.length} are needed")
    if args.elastic and args.micro_batches > 1:
        parser.error("--micro-batches are of each rank; with --elastic say how many parts all have")
    return args


def axes(text: str) -> dict[str, int]:
    """Read the sizes of a mesh: ``dp=2,tp=2``."""
    try:
        return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like dp=2,tp=2") from None


def recompute(text: str) -> int | str:
    """Read how layers run again: a word, or every how many layers an input is kept."""
    return int(text) if text.isdecimal() else text


def windows(text: np.ndarray, key: Key, count: int, length: int) -> np.ndarray:
    """Return ``[count, length + 1]`` pieces of a text, at places that depend on the key only."""
    starts = integers(key, len(text) - length, (count,))
    rows: np.ndarray = np.lib.stride_tricks.sliding_window_view(text, length + 1)[starts]
    return rows


class MicroBatches:
    """This rank's part of a batch."""

    def __init__(self, rows: Rows, batch: int, share: tuple[int, int], parts: int) -> None:
        """Take part `share` of ``(rank, ranks)`` of a batch of a size and cut it into `parts`."""
        rank, ranks = share
        if batch % (ranks * parts):
            raise SystemExit(
                f"--batch {batch} is not divisible by {ranks} data-parallel ranks x "
                f"{parts} micro-batches"
            )
        self.size = batch // (ranks * parts)
        self.first = rank * parts * self.size
        self.rows, self.parts = rows, parts

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= i < self.parts:
            raise IndexError(i)
        return self.rows(self.first + i * self.size, self.size)


class Trainer:
    """A model on a mesh with its text."""

    def __init__(self, args: argparse.Namespace, text: tuple[np.ndarray, ...]) -> None:
        """Take bytes to train on, and bytes to test with."""
        self.args, self.key = args, Key(args.seed)
        self.train, self.test = text
        self.cursor, self.tensor_ledger = Cursor(), Ledger()
        self.rate = WarmupCosine(args.lr, max(1, args.steps // 20), args.steps, floor=args.lr / 10)

    def build(self, comm: pycoll.Communicator) -> DataParallel:
        """Make mesh and engine of the ranks of a communicator; return the engine."""
        args = self.args
        self.comm, self.mesh = comm, Mesh(comm, **args.mesh)
        mesh = self.mesh
        tp = mesh.group("tp") if mesh.size("tp") > 1 else None
        context = Context(mesh.cp, args.context) if mesh.size("cp") > 1 else None
        self.take: Take = context.take if context else lambda rows: rows
        config = TransformerConfig(
            args.features,
            args.heads,
            args.depth,
            length=args.length,
            dropout=args.dropout,
            dtype="float64" if args.dtype == "float64" else "float32",
            comm=tp and Metered(tp, self.tensor_ledger, "tp", order=args.order),
            sequence_parallel=args.sequence_parallel and tp is not None,
            cursor=self.cursor,
            context=context,
        )
        model = GPT(config, args.seed, tied=args.tied)
        self.loss = model.loss()
        stages = mesh.size("pp") > 1
        flush = not stages or find(args.schedule).steps == 1
        self.engine = (Pipeline if stages else DataParallel)(
            model,
            self.loss,
            mesh,
            *((args.schedule, args.micro_batches) if stages else ()),
            recompute=args.recompute,
            offload=args.offload,
            zero=args.zero,
            optimizer=AdamW(args.lr, betas=(0.9, 0.95), weight_decay=0.1),
            order=args.order,
            precision=PRECISION[args.dtype],
            clip_norm=1.0 if flush else None,
            wrap=wrapper(args.array),
            device="cuda" if args.array == "cupy" else "cpu",
        )
        self.data_ranks = mesh.size("replica") * mesh.size("dp")
        self.data_rank = mesh.coordinate("replica") * mesh.size("dp") + mesh.coordinate("dp")
        return self.engine

    def rows(self, step: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of some windows of a step; tell the layers where they are."""
        key = self.key.fold("batch", step)
        batch = windows(self.train, key, self.args.batch, self.args.length)
        self.cursor.at(step, start)
        rows = batch[start : start + count]
        return self.take(rows[:, :-1]), self.take(rows[:, 1:])

    def step(self, step: int) -> tuple[StepReport, Counter[str], float]:
        """Train on one batch; return the engine's report, bytes by purpose and seconds waited."""
        args, share = self.args, (self.data_rank, self.data_ranks)
        rows = partial(self.rows, step)
        micro = MicroBatches(rows, args.batch, share, args.micro_batches)
        wire, waits = Counter(self.tensor_ledger.wire), self.tensor_ledger.waits.total()
        report = self.engine.step(micro, lr=self.rate(step))
        sent = Counter(report.bytes)
        for (purpose, _), nbytes in (self.tensor_ledger.wire - wire).items():
            sent[purpose] += nbytes
        waited = sum(report.waits.values()) + self.tensor_ledger.waits.total() - waits
        return report, sent, waited

    def evaluate(self) -> float:
        """Return the mean loss on text that is not trained on."""
        self.cursor.training = False
        rows = windows(self.test, self.key.fold("test"), EVAL_WINDOWS, self.args.length)
        own = np.array_split(rows, self.data_ranks)[self.data_rank]
        total = np.zeros(2)
        for start in range(0, len(own), EVAL_CHUNK):
            chunk = own[start : start + EVAL_CHUNK]
            inputs, targets = self.take(chunk[:, :-1]), self.take(chunk[:, 1:])
            loss, count, _ = self.loss.forward(self.engine.predict(inputs), targets)
            total += (loss, count)
        self.cursor.training = True
        total = self.mesh.group("replica", "dp", "cp").all_reduce(total)
        return float(total[0] / total[1])

    def baseline(self, order: int) -> float:
        """Return the loss of counting on the bytes that `evaluate` predicts."""
        losses = np.zeros(len(self.test))
        losses[order - 1 :] = python_text.ngram_losses(self.train, self.test, order)
        rows = windows(losses, self.key.fold("test"), EVAL_WINDOWS, self.args.length)
        return float(rows[:, 1:].mean())

    def digest(self) -> str:
        """Return the digest of all parameters, and check that every rank has the same."""
        digest = hashlib.sha256()
        for name, value in sorted(self.engine.gather().items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        row = np.frombuffer(digest.digest(), np.uint8).reshape(1, -1)
        if not (self.comm.all_gather(row) == row).all():
            raise SystemExit("ranks ended with different parameters")
        return digest.hexdigest()


def wrapper(library: str) -> Callable[[np.ndarray], Any]:
    """Return what makes an array of a library of one of the engine, sharing its memory."""
    if library != "torch":
        return lambda array: array
    import torch

    torch.set_num_threads(1)
    wrap: Callable[[np.ndarray], Any] = torch.from_numpy
    return wrap


def steps(trainer: Trainer) -> Iterator[Taken]:
    """Take all steps that are left, on these ranks."""
    args, engine, first = trainer.args, trainer.engine, 0
    if args.save:
        first = load(args.save, engine, if_any=True).steps
    for step in range(first, args.steps):
        yield step, *trainer.step(step)
        if args.save and (step + 1) % args.save_every == 0:
            save(args.save, engine, keep=2, background=True)


def elastic_steps(run: Elastic) -> Iterator[Taken]:
    """Take all steps that are left, on the ranks that there are; say who has left and come."""
    for report in run:
        if run.change and run.comm.rank == 0:
            print(run.change, flush=True)
        yield run.step - 1, report, Counter(report.bytes), sum(report.waits.values())


def train(trainer: Trainer, taken: Iterator[Taken], run: Elastic | None = None) -> None:
    """Go through steps, show how it goes, and at the end what came out; all ranks call it."""
    args, progress, loss = trainer.args, training_progress.Progress(trainer), float("nan")
    forgiving = run.forgiving if run else nullcontext
    for step, report, sent, waited in taken:
        loss = report.loss
        with forgiving():
            progress.add(step, report, sent, waited)
            if (step + 1) % (10 * args.every) == 0 or step + 1 == args.steps:
                progress.test(trainer.evaluate())
    end = partial(outcome, trainer)
    text = run.finish(end) if run else end()
    if trainer.comm.rank == 0:
        if args.plot:
            orders = {f"order-{n} n-gram": trainer.baseline(n) for n in ORDERS}
            training_progress.plot(args.plot, progress, orders)
        print(f"{text} loss={loss!r}", flush=True)


def outcome(trainer: Trainer) -> str:
    """Return what the last lines say of the parameters; a collective."""
    lines = [f"params sha256={trainer.digest()}"]
    if trainer.comm.rank == 0:
        lines[:0] = [f"order-{n} n-gram    loss {trainer.baseline(n):.4f}" for n in ORDERS]
    return "\n".join(lines)


def train_elastic(args: argparse.Namespace) -> None:
    """Train while ranks die and come."""
    trainer = Trainer(args, python_text.read(args.text_bytes))  # before the others are met
    run = Elastic(
        pycoll.init(),
        trainer.build,
        lambda step, samples: trainer.rows(step, samples[0] % args.batch, len(samples)),
        steps=args.steps,
        batch=args.batch,
        micro_batches=args.elastic,
        lr=trainer.rate,
        checkpoint=args.save,
        save_every=args.save_every if args.save else None,
    )
    train(trainer, elastic_steps(run), run)
    run.close()


def main() -> None:
    args = arguments()
    with threadpool_limits(1):
        if args.elastic:
            return train_elastic(args)
        with pycoll.init() as comm:
            trainer = Trainer(args, python_text.load(comm, args.text_bytes))
            trainer.build(comm)
            train(trainer, steps(trainer))
            trainer.engine.close()
            trainer.mesh.close()


if __name__ == "__main__":
    main()
