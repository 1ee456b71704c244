"""Tables of measured times in which something is odd: refused in words, or read as they are."""

import json

from mutate import cases, mutated, mutated_bytes, seeds
from pycoll.errors import ArgumentError
from pycoll.runtime.selection.select import select
from pycoll.runtime.selection.tuning_table import Tuning
from runtime.selection.test_tuning_table import RULE, table


def read(text, seed):
    """Read a table; whether it was taken. Then it says again what it has read, and can be used."""
    try:
        found = Tuning.parse(text)
    except ArgumentError:
        return False
    assert Tuning.parse(found.to_json()) == found, f"seed {seed}"
    for world in found.worlds:
        select("all_reduce", 1024, 4, world=world)
    return True


def test_documents():
    whole, taken = json.loads(table(RULE).to_json()), 0
    for seed, rng in cases():
        document = mutated(whole, rng)
        taken += read(json.dumps(document, default=str), seed)
    assert 0 < taken < 0.8 * len(seeds())


def test_texts():
    whole = table(RULE).to_json().encode()
    for seed, rng in cases():
        read(mutated_bytes(whole, rng).decode("utf-8", "replace"), seed)
