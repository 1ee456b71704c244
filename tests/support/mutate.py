"""Inputs that are nearly right: seeded mutations of bytes and of documents.

A test takes a thousand; ``FUZZ_INPUTS=1000000 FUZZ_SEED=7`` in the environment makes it more, and
others. Every input has a seed of its own, which a failing test names.
"""

import copy
import os
import random

ODD = (None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**400, 1e308, float("nan"), float("inf"))
ODD += ("", "0", "\0", "\ud800", "é" * 300, b"x", [], {}, [[]], {"": None}, 0.5, -0.0)


def seeds(inputs=1000):
    """Return the seeds of the inputs of a test."""
    first = int(os.environ.get("FUZZ_SEED", "0"))
    return range(first, first + int(os.environ.get("FUZZ_INPUTS", inputs)))


def mutated_bytes(data, rng):
    """Return bytes that differ from these: flipped, cut, longer, or with a part from elsewhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del found[at : at + rng.choice((1, 4, len(found)))]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 70)))
        else:
            part = found[rng.randrange(len(found) + 1) :][: rng.choice((1, 4, 16))]
            found[at : at + len(part)] = part
    return bytes(found)


def mutated(document, rng):
    """Return a document of dictionaries, lists and values in which some places are odd."""
    holder = [copy.deepcopy(document)]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        places = list(_places(holder))
        inside, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0 and inside is not holder:
            del inside[key]
        elif kind == 1 and isinstance(inside, dict):
            inside[rng.choice([*inside, "more", ""])] = _odd(rng)
        elif kind == 2 and isinstance(inside, list):
            inside.insert(key, _odd(rng))
        elif kind == 3:
            other, name = rng.choice(places)
            inside[key] = copy.deepcopy(other[name])
        elif kind == 4 and isinstance(inside[key], int | float):
            inside[key] = inside[key] * rng.choice((-1, 2, 2**40)) + rng.choice((-1, 0, 1))
        else:
            inside[key] = _odd(rng)
    return holder[0]


def _odd(rng):
    return copy.deepcopy(rng.choice(ODD))


def _places(inside):
    keys = inside if isinstance(inside, dict) else range(len(inside))
    for key in keys:
        yield inside, key
        if isinstance(inside[key], dict | list):
            yield from _places(inside[key])


def cases(inputs=1000):
    """Yield a source of random numbers for each input, and its seed."""
    for seed in seeds(inputs):
        yield seed, random.Random(seed)
