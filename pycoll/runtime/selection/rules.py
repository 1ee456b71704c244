"""The tables of the selector: which algorithm serves which calls.

`RULES` is for ranks that share memory, the others for ranks that send messages.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """One line of the table."""

    collective: str  # the collective it is about
    max_n: int  # largest world it is for
    max_bytes: int  # largest full vector it is for
    # it is for arrays in symmetric memory, and its algorithm works on them in place; also for
    # inputs there whose results lie elsewhere, if it only reads what belongs to others
    direct: bool
    names: tuple[str, ...]  # algorithms, best first; the first that gives the wanted order is taken
    why: str  # what speaks for it
    crowded: bool = False  # it is only for ranks that share cores: more of them than cores


K = 1 << 10
ANY_N, ANY_SIZE = 1 << 16, 1 << 62
FEW_N = 64  # what grows with the square of the ranks is for no more than so many, if it can be

_ONE_SHOT = ("one_shot", "one_shot_rank")
_PUSH = ("two_shot_push", "two_shot_push_rank")
_PULL = ("two_shot_pull", "two_shot_pull_rank")
_SUMS = ("direct", "direct_rank")
_FEW_SYNCS = "one synchronisation less outweighs the copies of so few bytes"
_FEW_PEERS = "for so few bytes what counts is the number of peers that a rank waits for"
_FEW_TURNS = "where ranks share cores, every synchronisation waits for each to get its turn on one"
_IN_PLACE = "ranks work on each other's arrays: each byte is loaded and stored as rarely as can be"
_SHARED = "many ranks fold at the same time, where otherwise the root would fold alone"
_SHARED_COPIES = "root and receivers copy at the same time, each an equal part"
_PIPELINED = "the others fetch a block while the root lays out the next"
_ONE_INPUT = "every rank reads one vector, not one of each rank below it, block behind block"
_FEW_COPIES = "it loads and stores the fewest bytes when arrays are staged"


def _one_round(collective: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Lines of a collective on staged arrays for which one round is the best for every size."""
    return (
        Rule(collective, ANY_N, 4 * K, False, names, _FEW_SYNCS),
        Rule(collective, ANY_N, ANY_SIZE, False, names, _FEW_COPIES),
    )


def _prefix(collective: str) -> tuple[Rule, ...]:
    """Lines of a prefix reduction, wherever its ranks are."""
    many = "chain", "doubling", "direct_rank", "direct"
    return (
        Rule(collective, 16, 8 * K, False, ("direct_rank", "direct"), _FEW_SYNCS),
        Rule(collective, FEW_N, 2 * K, False, ("direct_rank", "direct"), _FEW_SYNCS),
        Rule(collective, 2, ANY_SIZE, False, ("direct_rank", "direct"), _FEW_COPIES),
        Rule(collective, FEW_N, ANY_SIZE, False, ("chain", "direct_rank", "direct"), _ONE_INPUT),
        Rule(
            collective,
            ANY_N,
            2 * K,
            False,
            ("doubling", "chain", "direct_rank", "direct"),
            _FEW_PEERS,
        ),
        Rule(collective, ANY_N, ANY_SIZE, False, many, _ONE_INPUT),
    )


RULES = (
    Rule("all_reduce", 4, 4 * K, False, _ONE_SHOT, _FEW_SYNCS),
    Rule("all_reduce", 8, 2 * K, False, _ONE_SHOT, _FEW_SYNCS),
    Rule("all_reduce", 16, 1 * K, False, _ONE_SHOT, _FEW_SYNCS),
    Rule("all_reduce", 16, 8 * K, False, _ONE_SHOT, _FEW_TURNS, crowded=True),
    Rule("all_reduce", ANY_N, 256, False, ("recursive_doubling", *_ONE_SHOT), _FEW_PEERS),
    Rule("all_reduce", 16, ANY_SIZE, True, _PUSH, _IN_PLACE),
    Rule("all_reduce", 8, 32 * K, False, _ONE_SHOT, _FEW_TURNS, crowded=True),
    Rule("all_reduce", 16, 16 * K, False, _ONE_SHOT, _FEW_TURNS, crowded=True),
    Rule("all_reduce", 4, 8 * K, False, _ONE_SHOT, _FEW_SYNCS),
    Rule("all_reduce", 2, ANY_SIZE, False, _PUSH, _FEW_COPIES),
    Rule("all_reduce", 16, ANY_SIZE, False, _PULL, _FEW_COPIES),
    Rule("all_reduce", ANY_N, 4 * K, False, ("halving_doubling", *_PULL), _FEW_PEERS),
    Rule("all_reduce", ANY_N, ANY_SIZE, True, _PUSH, _IN_PLACE),
    Rule("all_reduce", ANY_N, ANY_SIZE, False, _PULL, _FEW_COPIES),
    Rule("reduce_scatter", 16, 4 * K, False, _SUMS, _FEW_SYNCS),
    Rule("reduce_scatter", ANY_N, 4 * K, False, ("halving", *_SUMS), _FEW_PEERS),
    Rule("reduce_scatter", ANY_N, ANY_SIZE, True, _SUMS, _IN_PLACE),
    Rule("reduce_scatter", ANY_N, ANY_SIZE, False, _SUMS, _FEW_COPIES),
    Rule("all_gather", 16, 8 * K, False, ("direct_pull",), _FEW_SYNCS),
    Rule("all_gather", ANY_N, 8 * K, False, ("doubling",), _FEW_PEERS),
    Rule("all_gather", ANY_N, ANY_SIZE, True, ("direct_push", "direct_pull"), _IN_PLACE),
    Rule("all_gather", 2, ANY_SIZE, False, ("direct_push",), _FEW_COPIES),
    Rule("all_gather", ANY_N, ANY_SIZE, False, ("direct_pull",), _FEW_COPIES),
    Rule("broadcast", ANY_N, 4 * K, False, ("direct",), _FEW_SYNCS),
    Rule("broadcast", ANY_N, 16 * K, True, ("direct",), _FEW_PEERS),
    Rule("broadcast", FEW_N, ANY_SIZE, True, ("push_pull",), _SHARED_COPIES),
    Rule("broadcast", ANY_N, 64 * K, False, ("direct",), _FEW_COPIES),
    Rule("broadcast", ANY_N, ANY_SIZE, False, ("relay",), _PIPELINED),
    Rule("reduce", 8, 4 * K, False, _SUMS, _FEW_SYNCS),
    Rule("reduce", ANY_N, 4 * K, False, ("binomial", *_SUMS), _FEW_PEERS),
    Rule("reduce", ANY_N, ANY_SIZE, True, _PUSH, _SHARED),
    Rule("reduce", 2, ANY_SIZE, False, _SUMS, _FEW_COPIES),
    Rule("reduce", 4, 128 * K, False, _SUMS, _FEW_COPIES),
    Rule("reduce", ANY_N, ANY_SIZE, False, _PUSH, _SHARED),
    Rule("gather", 2, 4 * K, False, ("binomial",), _FEW_SYNCS),
    *_one_round("gather", ("direct",)),
    *_one_round("scatter", ("direct",)),
    Rule("all_to_all", ANY_N, 4 * K, False, ("direct",), _FEW_SYNCS),
    Rule("all_to_all", ANY_N, ANY_SIZE, True, ("direct",), _IN_PLACE),
    Rule("all_to_all", ANY_N, ANY_SIZE, False, ("direct",), _FEW_COPIES),
    *_prefix("scan"),
    *_prefix("exscan"),
)
"""The first line that fits a call decides."""

_ONE_ROUND = "so few bytes take no time beside a second round"
_SAME_BYTES = "between two ranks one round sends as few bytes as two"
_FEW_ROUNDS = "for so few bytes what counts is the number of rounds"
_NO_CROWD = "one message in each of two rounds costs less than one to every rank in each"
_LEAST_BYTES = "every rank sends as few bytes as can be, all messages at once"
_FEW_MESSAGES = "every rank sends few bytes, and to few others"
_FEW_SENDS = "where ranks share cores, every message takes a core from the others"
_ROOT_FOLDS = "the root folds what the other has not touched; its half of the folds would come back"
_SHARED_FOLDS = "the ranks share the folds, which cost more than a second round"
_PIPELINE = "segments follow each other, and every rank sends the vector once"


def _any_size(collective: str, names: tuple[str, ...], why: str) -> Rule:
    return Rule(collective, ANY_N, ANY_SIZE, False, names, why)


_AT_ONCE = Rule("all_reduce", 4, 2 * K, False, _ONE_SHOT, _ONE_ROUND)
_ANYWHERE = (
    Rule("all_reduce", ANY_N, 2 * K, False, ("recursive_doubling", *_ONE_SHOT), _FEW_ROUNDS),
    Rule("all_reduce", 16, ANY_SIZE, False, _PULL, _LEAST_BYTES),
    _any_size("all_reduce", ("halving_doubling", *_PULL), _FEW_MESSAGES),
    Rule("reduce_scatter", 16, ANY_SIZE, False, _SUMS, _LEAST_BYTES),
    _any_size("reduce_scatter", ("halving", *_SUMS), _FEW_MESSAGES),
    Rule("all_gather", 16, ANY_SIZE, False, ("direct_pull",), _LEAST_BYTES),
    Rule("all_gather", ANY_N, 64 * K, False, ("doubling",), _FEW_ROUNDS),
    _any_size("all_gather", ("ring",), _LEAST_BYTES),
    Rule("broadcast", 2, ANY_SIZE, False, ("direct",), _LEAST_BYTES),
    Rule("broadcast", ANY_N, 64 * K, False, ("binomial",), _FEW_ROUNDS),
    Rule("broadcast", 8, ANY_SIZE, False, ("ring",), _PIPELINE),
    _any_size("broadcast", ("circulant",), _PIPELINE),
    Rule("gather", 16, ANY_SIZE, False, ("direct",), _LEAST_BYTES),
    _any_size("gather", ("binomial",), _FEW_ROUNDS),
    Rule("scatter", 16, ANY_SIZE, False, ("direct",), _LEAST_BYTES),
    _any_size("scatter", ("binomial",), _FEW_ROUNDS),
    _any_size("all_to_all", ("direct",), _LEAST_BYTES),
    *_prefix("scan"),
    *_prefix("exscan"),
)

_EXCHANGE = ("recursive_doubling", *_ONE_SHOT)
_BINOMIAL = ("binomial", *_SUMS)
LINK_RULES = (
    Rule("all_reduce", 2, ANY_SIZE, False, _EXCHANGE, _SAME_BYTES),
    _any_size("reduce", _BINOMIAL, _FEW_ROUNDS),
    Rule("all_reduce", 16, 4 * K, False, _EXCHANGE, _FEW_SENDS, crowded=True),
    _AT_ONCE,
    Rule("all_reduce", 4, 4 * K, False, _EXCHANGE, _NO_CROWD),
    Rule("all_reduce", 3, ANY_SIZE, False, _PULL, _LEAST_BYTES),
    Rule("all_reduce", 4, 64 * K, False, ("halving_doubling", *_PULL), _FEW_SENDS, crowded=True),
    Rule("all_reduce", 7, ANY_SIZE, False, _PULL, _LEAST_BYTES),
    Rule("all_reduce", 16, 64 * K, False, ("halving_doubling", *_PULL), _FEW_SENDS, crowded=True),
    *_ANYWHERE,
)
"""The first line that fits a call decides; every collective ends with a line that fits all."""
ONE_HOST_RULES = (
    Rule("all_reduce", 2, 64 * K, False, _ONE_SHOT, _ONE_ROUND),
    Rule("reduce", 2, ANY_SIZE, False, _BINOMIAL, _ROOT_FOLDS),
    Rule("reduce", ANY_N, 512 * K, False, _BINOMIAL, _FEW_ROUNDS),
    _any_size("reduce", _PUSH, _SHARED_FOLDS),
    _AT_ONCE,
    *_ANYWHERE,
)
"""Likewise on one host, where messages are so fast that what counts is who folds how much."""
