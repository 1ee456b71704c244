"""The algorithms, one idea a file, and the table of them all."""

from __future__ import annotations

import difflib

from pycoll.algorithms import (
    bruck,
    circulant,
    direct,
    double_tree,
    halving_doubling,
    pairwise,
    pat,
    prefix,
    ring,
    tree,
)
from pycoll.algorithms.locality import bine, bucket, swing
from pycoll.algorithms.two_level import hierarchical
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Algorithm

ALGORITHMS: tuple[Algorithm, ...] = (
    ring.all_reduce,
    halving_doubling.all_reduce,
    halving_doubling.recursive_doubling,
    *direct.one_shot,
    *direct.two_shot_push,
    *direct.two_shot_pull,
    circulant.all_reduce,
    double_tree.all_reduce,
    swing.all_reduce,
    bucket.all_reduce,
    hierarchical.hierarchical,
    hierarchical.hierarchical_tree,
    hierarchical.hierarchical_ring,
    ring.reduce_scatter,
    halving_doubling.reduce_scatter,
    *direct.reduce_scatter,
    circulant.reduce_scatter,
    pairwise.reduce_scatter,
    pat.reduce_scatter,
    ring.all_gather,
    halving_doubling.all_gather,
    direct.all_gather_pull,
    direct.all_gather_push,
    circulant.all_gather,
    bruck.all_gather,
    swing.all_gather,
    pat.all_gather,
    ring.broadcast,
    direct.broadcast,
    direct.broadcast_push_pull,
    direct.broadcast_relay,
    circulant.broadcast,
    tree.broadcast,
    bine.broadcast,
    ring.reduce,
    *direct.reduce,
    *direct.reduce_push,
    circulant.reduce,
    tree.reduce,
    bine.reduce,
    direct.gather,
    tree.gather,
    direct.scatter,
    tree.scatter,
    direct.all_to_all,
    pairwise.all_to_all,
    bruck.all_to_all,
    *prefix.scan,
    prefix.scan_chain,
    prefix.scan_doubling,
    *prefix.exscan,
    prefix.exscan_chain,
    prefix.exscan_doubling,
)


_BY_NAME = {(entry.collective, entry.name): entry for entry in ALGORITHMS}


def names(collective: str) -> list[str]:
    """Names of the algorithms for a collective, in the order of the table."""
    return [entry.name for entry in ALGORITHMS if entry.collective == collective]


def find(collective: str, name: str) -> Algorithm:
    """Look an algorithm up.

    Raises:
        ScheduleError: If there is none of that name for that collective.
    """
    found = _BY_NAME.get((collective, name))
    if found is not None:
        return found
    known = names(collective)
    if not known:
        kinds = list(dict.fromkeys(entry.collective for entry in ALGORITHMS))
        raise ScheduleError(f"unknown collective {collective!r}{closest(collective, kinds)}")
    raise ScheduleError(f"{collective} has no algorithm {name!r}{closest(name, known)}")


def closest(name: str, known: list[str]) -> str:
    """Say in an error which name may be meant, and which there are."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known)}"
