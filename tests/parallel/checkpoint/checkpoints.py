"""What tests of checkpoints share: a small GPT on several meshes, and digests of its state."""

import hashlib
from contextlib import contextmanager

import numpy as np

from parallel.gpt_training import BATCH, SIZE, Turns
from pycoll.parallel import AdamW, DataParallel, Mesh, Pipeline
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.random import Cursor

MESHES = {
    "one": (1, {"dp": 1}, {}),
    "dp4": (4, {"dp": 4}, {"bucket_bytes": 3000}),
    "dp2 tp2": (4, {"dp": 2, "tp": 2}, {"zero": 1}),
    "tp2 pp2": (4, {"pp": 2, "tp": 2}, {}),
    "zero3 dp3": (3, {"dp": 3}, {"zero": 3}),
    "replica2 dp2": (4, {"replica": 2, "dp": 2}, {"zero": 2}),
}


@contextmanager
def engine_on(comm, name="one", **changes):
    """Make an engine on a mesh of `MESHES`."""
    _, axes, options = MESHES[name]
    options = {"optimizer": AdamW(lr=3e-3), "clip_norm": 0.5, **options, **changes}
    with Mesh(comm, **axes) as mesh:
        tp = mesh.group("tp") if mesh.size("tp") > 1 else None
        model = GPT(TransformerConfig(**SIZE, comm=tp, cursor=Cursor()), seed=3, tied=True)
        kind = DataParallel
        if "pp" in axes:
            kind, options = Pipeline, options | {"micro_batches": 4}
        with kind(model, model.loss(), mesh, **options) as engine:
            yield engine


def train(engine, steps, micro=4):
    """Take steps; the micro-batches of a step are those of one process."""
    data = engine.groups.data
    count = micro // data.world_size
    for _ in range(steps):
        first = data.rank * count * (BATCH // micro)
        engine.step(Turns(engine.steps, first, BATCH // micro, count, Cursor()))


def digest(engine):
    """Return one number for all parameters, states and counters; a collective."""
    found = engine.state_dict()
    total = hashlib.sha256(f"{found['steps']} {found['loss_scale']}".encode())
    for kind in ("parameters", *engine.options.optimizer.slots):
        for name in sorted(found[kind]):
            total.update(f"{kind} {name} {found[kind][name].shape}".encode())
            total.update(np.ascontiguousarray(found[kind][name]).tobytes())
    return total.hexdigest()
