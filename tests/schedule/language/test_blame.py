"""What is wrong in an author's function is told with the algorithm, the line and the cause."""

import functools
import sys

import pytest

from pycoll.errors import PeerLost, ScheduleError
from pycoll.schedule.ir import IN, OUT, TMP, algorithm, at, fold
from pycoll.schedule.proof.verify import prove


def every(rank, n, **given):
    return fold(at(rank, IN), **{"to": at(rank, OUT), **given})


def stuck(rank, n):
    while True:
        yield []


def too_few(rank):
    yield every(rank, 1)


def loud(rank, n):
    yield every(rank, n)
    raise ValueError("boom")


def lost(rank, n):
    raise PeerLost("rank 1")
    yield


def only_rank_0(rank, n):
    if rank == 0:
        yield every(rank, n)


def of(make):
    """Return a generator of the rounds that ``make(rank, n)`` gives."""

    def rounds(rank, n):
        yield make(rank, n)

    return rounds


WRONG = {
    "at.*the buffer is 'IN'": of(lambda r, n: fold(at(r, "IN", 0), to=at(r, OUT))),
    "at.*the buffer is 7": of(lambda r, n: fold(at(r, 7), to=at(r, OUT))),
    "the rank is 0.5, expected an integer": of(lambda r, n: every(r, n, to=at(0.5, OUT))),
    r"the rank is \[\[0\], ": of(lambda r, n: every(r, n, to=at([[0], [1, 2]], OUT))),
    "the chunk is None": of(lambda r, n: every(r, n, to=at(r, OUT, None))),
    "the chunk is 9223372036854775808": of(lambda r, n: every(r, n, to=at(r, OUT, 1 << 63))),
    "the sources are 3": of(lambda r, n: fold(3, to=at(r, OUT))),
    "the destinations are None": of(lambda r, n: every(r, n, to=None)),
    r"the destinations are \[.*, 3\]": of(lambda r, n: every(r, n, to=[at(r, OUT), 3])),
    "at least one source": of(lambda r, n: fold([], to=at(r, OUT))),
    "count is 1.5": of(lambda r, n: every(r, n, count=1.5)),
    "where is 'no'": of(lambda r, n: every(r, n, where="no")),
    "the sources are 65536, expected": of(lambda r, n: fold([at(r, IN)] * 65536, to=at(r, OUT))),
    "unexpected keyword argument 'op'": of(lambda r, n: every(r, n, op="sum")),
    "TypeError: too_few.. takes 1 positional": too_few,
    "ValueError: boom": loud,
    "ValueError: The truth value": only_rank_0,
    "ZeroDivisionError": of(lambda r, n: 1 // 0),
    "SystemExit: 0": of(lambda r, n: sys.exit(0)),
    "gives None in place of rounds": lambda rank, n: None,
    "round 0 is None, expected a fold": of(lambda r, n: None),
    "more than 262144 folds or rounds": stuck,
}


@pytest.mark.parametrize(("text", "rounds"), WRONG.items(), ids=range(len(WRONG)))
def test_the_line_and_the_cause_are_told(text, rounds):
    made = algorithm("all_reduce", "mine", chunks=1)(rounds)
    with pytest.raises(
        ScheduleError, match=rf"^all_reduce/mine\(n=3\): test_blame.py:\d+: .*{text}"
    ):
        prove(made.schedule(3))


def test_the_line_is_the_one_that_raises():
    with pytest.raises(ScheduleError) as caught:
        prove(algorithm("all_reduce", chunks=1)(loud).schedule(2))
    line = loud.__code__.co_firstlineno + 2
    assert str(caught.value).startswith(f"all_reduce/loud(n=2): test_blame.py:{line}: ")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("count", [-1, 5, 10**12])
def test_folds_of_chunks_that_are_not_there(count):
    made = algorithm("all_reduce", chunks=4)(of(lambda r, n: every(r, n, count=count)))
    with pytest.raises(ScheduleError, match=f"round 0: a fold covers {count} chunks, expected 0"):
        prove(made.schedule(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunks": lambda n: 1 // 0}, r"chunks: test_blame.py:\d+: ZeroDivisionError"),
        ({"slots": "many"}, "slots: TypeError"),
        ({"worlds": 3}, r"worlds\(3\): TypeError"),
        ({"worlds": lambda n: 1 // 0}, r"worlds\(3\): test_blame.py:\d+: ZeroDivisionError"),
        ({"root": "x"}, "there is no rank 'x' to be the root"),
    ],
)
def test_options_that_cannot_be(options, text):
    def rounds(rank, n, **_):
        yield fold([at(peer, IN) for peer in range(n)], to=at(rank, TMP))

    with pytest.raises(ScheduleError, match=text):
        prove(algorithm("all_reduce", **{"chunks": 1, "slots": 1, **options})(rounds).schedule(3))


def test_what_is_no_algorithm():
    with pytest.raises(ScheduleError, match=r"collective=.'x'. is not known"):
        algorithm(["x"])
    with pytest.raises(ScheduleError, match="3 has no name"):
        algorithm("all_reduce")(3)
    with pytest.raises(ScheduleError, match="'int' object is not callable"):
        prove(algorithm("all_reduce", "three")(3).schedule(2))
    for n in (2.5, "3", None):
        with pytest.raises(ScheduleError, match="is no number of ranks"):
            algorithm("all_reduce")(loud).schedule(n)


def test_other_errors_of_pycoll_stay():
    with pytest.raises(PeerLost, match="rank 1"):
        prove(algorithm("all_reduce", chunks=1)(lost).schedule(2))


def test_a_function_with_some_arguments_given():
    def rounds(rank, n, by):
        yield fold((at(peer + by, IN) for peer in range(n)), to=at(rank, OUT))

    made = algorithm("all_reduce", "part", chunks=1, in_place=False)
    prove(made(functools.partial(rounds, by=0)).schedule(3))
    with pytest.raises(ScheduleError, match=r"test_blame.py:\d+: TypeError"):
        prove(made(functools.partial(rounds, by=None)).schedule(3))
