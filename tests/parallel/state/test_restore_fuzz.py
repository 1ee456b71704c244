"""Saved states in which something is odd: loaded as they are, or nothing has changed."""

import numpy as np

from mutate import cases, mutated, seeds
from parallel.state.test_restore import engine, flat
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import TopK
from pycoll.testing import run_threads

ODD_ARRAYS = (
    lambda x, rng: x[:-1],
    lambda x, rng: x.astype(rng.choice(["int8", "float16", "complex64", "object", "U3", "M8[s]"])),
    lambda x, rng: x.reshape(-1),
    lambda x, rng: np.asfortranarray(x),
    lambda x, rng: x[..., ::-1],
    lambda x, rng: np.full_like(x, np.nan),
    lambda x, rng: x.tolist(),
    lambda x, rng: x.tobytes(),
    lambda x, rng: np.float64(1),
    lambda x, rng: np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim),
)


def odd(saved, rng):
    """Return a state with a changed place, or a changed array."""
    if rng.random() < 0.5:
        return mutated(saved, rng)
    kind = rng.choice([k for k, v in saved.items() if isinstance(v, dict) and v])
    name = rng.choice(list(saved[kind]))
    if not isinstance(saved[kind][name], np.ndarray):
        return dict(saved)
    return saved | {kind: saved[kind] | {name: rng.choice(ODD_ARRAYS)(saved[kind][name], rng)}}


def load(comm, with_hook, inputs):
    """Load odd states on rank 0 and sound ones elsewhere, or the same on all; return what share."""
    options = {"hook": TopK(ratio=0.2)} if with_hook else {}
    made = engine(comm, **options)
    sound, taken = made.state_dict(), []
    given = before = flat(sound)
    for seed, rng in cases(inputs):
        state, alone = odd(sound, rng), rng.random() < 0.3
        try:
            made.load_state_dict(sound if alone and comm.rank else state)
        except (ArgumentError, MismatchError):
            assert flat(made.state_dict()) == before, f"seed {seed}"
            taken.append(False)
        else:
            before = flat(made.state_dict())
            taken.append(True)
    assert flat(sound) == given, "what was loaded has changed"
    made.load_state_dict(sound)
    made.close()
    return sum(taken) / len(taken)


LIMIT_S = 20 + len(seeds(500)) / 20


def test_one_rank():
    (taken,) = run_threads(1, lambda comm: load(comm, True, 500), timeout=LIMIT_S)
    assert 0 < taken < 0.8


def test_two_ranks():
    found = run_threads(2, lambda comm: load(comm, False, 500), timeout=LIMIT_S)
    assert len(set(found)) == 1
