"""A small GPT on made-up text, trained on one rank: what tests of engines compare."""

from pycoll.parallel import AdamW, DataParallel, Mesh, Options
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.random import Cursor, Key, integers

SIZE = {"features": 16, "heads": 4, "depth": 2, "vocabulary": 12, "length": 8}
BATCH, STEPS = 8, 50
STARTS, MOVES = integers(Key(8), 12, (STEPS, BATCH, 1)), integers(Key(9), 2, (STEPS, BATCH, 9))
WHOLE = (STARTS + MOVES.cumsum(axis=2)) % 12  # a token is followed by itself or the next one


class Turns:
    """Micro-batches that move the cursor when they are taken."""

    def __init__(self, step, first, size, count, cursor):
        self.step, self.first, self.size, self.count, self.cursor = step, first, size, count, cursor

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        start = self.first + i * self.size
        self.cursor.at(self.step, start)
        rows = WHOLE[self.step, start : start + self.size]
        return rows[:, :-1], rows[:, 1:]


def train(comm, axes, steps=STEPS, micro=4, wrap=Options.wrap, tied=False, dtype="float32", **more):
    """Train on one rank; return losses, norms and parameters.

    Args:
        comm: All ranks.
        axes: Sizes of the mesh.
        steps: Number of steps.
        micro: Micro-batches of a step, over all ranks.
        wrap: See `DataParallel`.
        tied: See `GPT`.
        dtype: Type of everything.
        more: Of `dropout` and `sequence_parallel`, for the model; others, for the engine.
    """
    mesh, cursor = Mesh(comm, **axes), Cursor()
    tp = mesh.group("tp") if mesh.size("tp") > 1 else None
    shape = {name: more.pop(name) for name in ("dropout", "sequence_parallel") if name in more}
    shape["sequence_parallel"] = shape.get("sequence_parallel", False) and tp is not None
    config = TransformerConfig(**SIZE, comm=tp, cursor=cursor, dtype=dtype, **shape)
    model = GPT(config, seed=3, tied=tied)
    recipe = {"float32": "fp32", "float64": "fp64"}[dtype]
    engine = DataParallel(
        model,
        model.loss(),
        mesh,
        optimizer=AdamW(lr=3e-3),
        clip_norm=0.5,
        precision=recipe,
        wrap=wrap,
        **more,
    )
    ranks = mesh.size("dp") * mesh.size("replica")
    rank = mesh.coordinate("replica") * mesh.size("dp") + mesh.coordinate("dp")
    count, size = micro // ranks, BATCH // micro
    reports = [
        engine.step(Turns(step, rank * count * size, size, count, cursor)) for step in range(steps)
    ]
    found = [r.loss for r in reports], [r.grad_norm for r in reports], engine.gather()
    engine.close()
    mesh.close()
    return found
