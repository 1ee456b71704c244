"""The table of the selector for ranks that send messages; see `pycoll.runtime.selection.rules`."""

from __future__ import annotations

from pycoll.runtime.selection.rules import ANY_N, ANY_SIZE, K, Rule

_ONE_SHOT = ("one_shot", "one_shot_rank")
_TWO_SHOT = ("two_shot_pull", "two_shot_pull_rank")
_SUMS = ("direct", "direct_rank")
_ONE_ROUND = "so few bytes take no time beside a second round"
_SAME_BYTES = "between two ranks one round sends as few bytes as two"
_FEW_ROUNDS = "for so few bytes what counts is the number of rounds"
_LEAST_BYTES = "every rank sends as few bytes as can be, all messages at once"
_FEW_MESSAGES = "every rank sends few bytes, and to few others"
_ROOT_FOLDS = "the root folds what the other has not touched; its half of the folds would come back"
_SHARED_FOLDS = "the ranks share the folds, which cost more than a second round"
_PIPELINE = "segments follow each other, and every rank sends the vector once"


def _any_size(collective: str, names: tuple[str, ...], why: str) -> Rule:
    return Rule(collective, ANY_N, ANY_SIZE, False, names, why)


_ANYWHERE = (
    Rule("all_reduce", 4, 2 * K, False, _ONE_SHOT, _ONE_ROUND),
    Rule("all_reduce", ANY_N, 2 * K, False, ("recursive_doubling", *_ONE_SHOT), _FEW_ROUNDS),
    Rule("all_reduce", 16, ANY_SIZE, False, _TWO_SHOT, _LEAST_BYTES),
    _any_size("all_reduce", ("halving_doubling", *_TWO_SHOT), _FEW_MESSAGES),
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
)

_EXCHANGE = ("recursive_doubling", *_ONE_SHOT)
_BINOMIAL = ("binomial", *_SUMS)
LINK_RULES = (
    Rule("all_reduce", 2, ANY_SIZE, False, _EXCHANGE, _SAME_BYTES),
    _any_size("reduce", _BINOMIAL, _FEW_ROUNDS),
    *_ANYWHERE,
)
"""The first line that fits a call decides; every collective ends with a line that fits all."""
ONE_HOST_RULES = (
    Rule("all_reduce", 2, 64 * K, False, _EXCHANGE, _ONE_ROUND),
    Rule("reduce", 2, ANY_SIZE, False, _BINOMIAL, _ROOT_FOLDS),
    Rule("reduce", ANY_N, 512 * K, False, _BINOMIAL, _FEW_ROUNDS),
    _any_size("reduce", ("two_shot_push", "two_shot_push_rank"), _SHARED_FOLDS),
    *_ANYWHERE,
)
"""Likewise on one host, where messages are so fast that what counts is who folds how much."""
