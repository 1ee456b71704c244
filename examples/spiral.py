"""Train a small network on spirals: serial, with a parameter server, and with an all-reduce.

    python examples/spiral.py --workers 2 --plot spiral.png

Every step has one part of the points for each worker. The serial program goes through the parts one
after the other. With a parameter server, one thread holds the parameters: workers (threads) push
their gradients to it and pull new parameters. With an all-reduce there is no server: workers
(processes) add up their gradients and each makes the same step. Gradients are added in the order of
the workers each time, so that all three end with the same bits. An asynchronous server applies each
gradient when it comes, so that no worker waits for another, and every run ends elsewhere.
"""

import argparse
import hashlib
import time
from collections.abc import Mapping

import numpy as np
from threadpoolctl import threadpool_limits

from pycoll import Communicator
from pycoll.parallel import SGD, ParameterServer
from pycoll.parallel.nn import Chain, CrossEntropy, Linear, ReLU, initial
from pycoll.parallel.optim import UpdateArgs
from pycoll.parallel.random import Key, normal
from pycoll.testing import run_processes, run_threads

Points = tuple[np.ndarray, np.ndarray]  # their places and their arms
ARMS, TURNS, NOISE = 3, 0.75, 0.12
HIDDEN, OPTIMIZER = 256, SGD(0.4, momentum=0.9)
KEY = Key(1)
NET = Chain(
    ("hidden", Linear(2, HIDDEN, KEY.fold("hidden"), std=1.0)),
    ("relu", ReLU()),
    ("output", Linear(HIDDEN, ARMS, KEY.fold("output"))),
)
LOSS = CrossEntropy()


def spirals(points: int) -> Points:
    """Return ``[points, 2]`` positions and ``[points]`` arms, in an order that mixes the arms."""
    arm = np.arange(points) % ARMS
    radius = (np.arange(points) // ARMS + 1) / (points // ARMS)
    angle = 2 * np.pi * (TURNS * radius + arm / ARMS) + NOISE * normal(KEY.fold("noise"), (points,))
    order = np.argsort(normal(KEY.fold("order"), (points,)))
    x = radius[:, None] * np.stack([np.sin(angle), np.cos(angle)], axis=1)
    return x[order].astype(np.float32), arm[order]


def unflatten(flat: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parameters by name, as views of one vector."""
    views, start = {}, 0
    for name, spec in NET.parameters().items():
        size = int(np.prod(spec.shape))
        views[name] = flat[start : start + size].reshape(spec.shape)
        start += size
    return views


def flatten(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays.values()])


class Model:
    """Parameters with their momentum: one step of gradient descent."""

    def __init__(self) -> None:
        self.flat, self.steps = flatten(initial(NET)), 0
        self.states = {"momentum": np.zeros_like(self.flat)}

    def step(self, gradient: np.ndarray, points: int) -> None:
        """Take a step with the gradient of the sum of the losses of so many points."""
        self.steps += 1
        args = UpdateArgs(
            self.steps, OPTIMIZER.lr, self.flat, gradient, self.states, scale=1 / points
        )
        OPTIMIZER.update(args)


def push(flat: np.ndarray, part: Points) -> np.ndarray:
    """Return the gradient of the sum of the losses of a part's points, and this sum."""
    x, arm = part
    params = unflatten(flat)
    logits, saved = NET.forward(params, x)
    loss, _, held = LOSS.forward(logits, arm)
    gradient = flatten(NET.backward_weight(params, saved, LOSS.backward(held, 1.0)))
    return np.append(gradient, np.float32(loss))


def parts_of(points: int, workers: int) -> list[Points]:
    x, arm = spirals(points)
    return list(zip(np.array_split(x, workers), np.array_split(arm, workers), strict=True))


class Curve:
    """Losses of a run and when they were known."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.losses: list[float] = []
        self.times: list[float] = []

    def add(self, loss: float) -> None:
        self.losses.append(float(loss))
        self.times.append(time.perf_counter() - self.start)


Run = tuple[np.ndarray, Curve]  # parameters at the end, and losses


def serial(workers: int, points: int, steps: int) -> Run:
    parts, model, curve = parts_of(points, workers), Model(), Curve()
    for _ in range(steps):
        total = push(model.flat, parts[0])
        for part in parts[1:]:
            total += push(model.flat, part)
        model.step(total[:-1], points)
        curve.add(total[-1] / points)
    return model.flat, curve


def parameter_server(
    workers: int, points: int, steps: int, mode: str = "sync", rate: float = OPTIMIZER.lr
) -> Run:
    """The last rank is the server; every worker pushes one gradient and pulls one answer a step."""

    def rank(comm: Communicator) -> Run:
        start = flatten(initial(NET))
        with ParameterServer(comm, start, mode=mode, optimizer=OPTIMIZER, order="rank") as ps:
            comm.barrier()
            curve = Curve()
            if ps.worker is None:
                ps.serve()
            else:
                part = parts_of(points, workers)[ps.worker]
                for _ in range(steps):
                    row = push(ps.pull(), part)
                    ps.push(row[:-1], samples=len(part[0]), lr=rate)
                    curve.add(row[-1] / points)
                ps.finish()
            return ps.gather(), curve

    results = run_threads(workers + 1, rank, timeout=600)
    (flat, curve), others = results[0], results[1:-1]
    curve.losses = np.sum([curve.losses, *(other.losses for _, other in others)], axis=0).tolist()
    return flat, curve


def asynchronous(workers: int, points: int, steps: int) -> Run:
    """As many pushes, each applied by itself: so each changes less."""
    return parameter_server(workers, points, steps, "async", OPTIMIZER.lr / workers)


def all_reduce(workers: int, points: int, steps: int) -> Run:
    """Every rank is a worker."""

    def rank(comm: Communicator) -> Run:
        part, model = parts_of(points, workers)[comm.rank], Model()
        total = comm.empty(len(model.flat) + 1)
        comm.barrier()
        curve = Curve()
        for _ in range(steps):
            total[:] = push(model.flat, part)
            comm.all_reduce(total, out=total, order="rank")
            model.step(total[:-1], points)
            curve.add(total[-1] / points)
        return model.flat, curve

    results: list[Run] = run_processes(workers, rank, timeout=600)
    return results[0]


def accuracy(flat: np.ndarray, points: int) -> float:
    x, arm = spirals(points)
    return float((NET.forward(unflatten(flat), x)[0].argmax(axis=1) == arm).mean())


def plot(path: str, flat: np.ndarray, curves: dict[str, Curve], points: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    x, arm = spirals(points)
    edge = 1.15
    axis = np.linspace(-edge, edge, 400, dtype=np.float32)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    regions = NET.forward(unflatten(flat), grid)[0].argmax(axis=1).reshape(400, 400)
    box = (-edge, edge, -edge, edge)
    left.imshow(regions, origin="lower", extent=box, cmap="Pastel1", vmin=0, vmax=8)
    some = slice(0, 900)
    left.scatter(*x[some].T, c=arm[some], s=6, cmap="Set1", vmin=0, vmax=8)
    left.set(title=f"What was learned: {accuracy(flat, points):.1%} right", xticks=[], yticks=[])
    for (name, curve), style in zip(curves.items(), ("-", "--", ":", "-"), strict=True):
        right.plot(curve.times, curve.losses, style, label=f"{name}: {curve.times[-1]:.2f} s")
    right.set(title="As many steps, sooner", xlabel="seconds", ylabel="loss", yscale="log")
    right.legend()
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on spirals.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--points", type=int, default=12000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", metavar="FILE", help="draw what was learned, and the losses")
    args = parser.parse_args()
    curves, digests = {}, set()
    for name, train in (
        ("serial", serial),
        ("parameter server", parameter_server),
        ("asynchronous", asynchronous),
        ("all-reduce", all_reduce),
    ):
        with threadpool_limits(1):  # a worker has one core
            flat, curve = train(args.workers, args.points, args.steps)
        curves[name] = curve
        if name != "asynchronous":
            digests.add(hashlib.sha256(flat.tobytes()).hexdigest())
        speedup = curves["serial"].times[-1] / curve.times[-1]
        print(
            f"{name:17} {curve.times[-1]:6.2f} s   {speedup:4.2f} x   loss {curve.losses[-1]:.4f}"
            f"   accuracy {accuracy(flat, args.points):.1%}",
            flush=True,
        )
    if len(digests) > 1:
        raise SystemExit("the programs ended with different parameters")
    print(f"the same parameters, bit for bit: sha256={digests.pop()}")
    if args.plot:
        plot(args.plot, flat, curves, args.points)


if __name__ == "__main__":
    main()
