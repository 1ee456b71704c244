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
    """Return a document of dictionaries, lists and values in which some places are odd.

    It shares with the given one what has not changed.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        holder = [document]
        keys, was = _place(holder, rng)
        inside, key = _own(holder, keys[:-1]), keys[-1]
        kind = rng.randrange(6)
        if kind == 0 and inside is not holder:
            del inside[key]
        elif kind == 1 and isinstance(inside, dict):
            inside[rng.choice([*inside, "more", ""])] = rng.choice(ODD)
        elif kind == 2 and isinstance(inside, list):
            inside.insert(key, rng.choice(ODD))
        elif kind == 3:
            inside[key] = _place([document], rng)[1]
        elif kind == 4 and isinstance(was, int | float):
            inside[key] = was * rng.choice((-1, 2, 2**40)) + rng.choice((-1, 0, 1))
        else:
            inside[key] = rng.choice(ODD)
        document = holder[0]
    return document


def _place(inside, rng):
    """Draw a place, level by level; return the keys that lead there, and what is there."""
    keys = []
    while isinstance(inside, dict | list) and inside and (not keys or rng.random() < 0.85):
        keys.append(
            rng.choice(list(inside)) if isinstance(inside, dict) else rng.randrange(len(inside))
        )
        inside = inside[keys[-1]]
    return keys, inside


def _own(inside, keys):
    """Copy the dictionaries and lists on the way; return the last of them."""
    for key in keys:
        inside[key] = copy.copy(inside[key])
        inside = inside[key]
    return inside


def cases(inputs=1000):
    """Yield a source of random numbers for each input, and its seed."""
    for seed in seeds(inputs):
        yield seed, random.Random(seed)
