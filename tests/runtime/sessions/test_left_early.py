"""Calls that ranks leave early over messages (strict="next"): what they give, and how they fail."""

import os
import random
import re
import signal
import time

import numpy as np
import pytest

import cases
import chaos
import oracle
from cases import shared_float
from pycoll import errors
from pycoll.config import Config
from pycoll.errors import ArgumentError, CollError, CollTimeout, MismatchError, PeerLost
from pycoll.runtime.calls.plans import LINK_EAGER_BYTES
from pycoll.testing import run_processes

MOST = 8  # calls that are left early in a row: UnprovenCalls::kMost
NEXT = Config(10.0, strict="next")
X = np.ones(4)


def over_tcp(n, body, config=NEXT, **options):
    """Run a function on ranks that are each on a host of its own; return what it returns.

    It gets the communicator, and closes it or not.
    """

    def part(comm):
        connected = chaos.over_tcp(comm, list(range(n)), config)
        try:
            return body(connected)
        finally:
            connected._session.close()

    return run_processes(n, part, timeout=60, **options)


def failure_of(calls):
    """Return the number of the call that raised, its error's name and text."""
    for number, call in enumerate(calls):
        try:
            call()
        except CollError as error:
            return number, type(error).__name__, str(error)
    return None


# name: the call, and a rank of three that leaves it before the last one has entered
EARLY = {
    "broadcast": (lambda comm: comm.broadcast(np.ones(4)), 0),
    "scatter": (lambda comm: comm.scatter(np.ones(6)), 0),
    "reduce": (lambda comm: comm.reduce(np.ones(4), root=2), 0),
    "gather": (lambda comm: comm.gather(np.ones(4), root=2), 0),
    "scan": (lambda comm: comm.scan(np.ones(4)), 0),
    "in the background": (lambda comm: comm.broadcast(np.ones(4), async_op=True).wait(), 0),
    "a plan": (lambda comm: comm.plan("broadcast", np.ones(4))(np.ones(4)), 0),
}


@pytest.mark.parametrize("name", EARLY)
def test_who_needs_nothing_of_others_leaves_early(name):
    call, early = EARLY[name]
    left = shared_float()

    def body(comm):
        comm.barrier()
        while comm.rank == 2 and not left[0]:
            time.sleep(0.001)
        call(comm)
        if comm.rank == early:
            left[0] = 1
        comm.close()
        return left[0]

    assert over_tcp(3, body) == [1, 1, 1]


@pytest.mark.parametrize("nbytes", [8, LINK_EAGER_BYTES + 8])
def test_larger_messages_and_calls_of_all_wait_for_all(nbytes):
    entered = shared_float()

    def body(comm):
        found = []
        for call in (comm.broadcast, comm.all_reduce):
            if call == comm.broadcast and nbytes == 8:
                continue
            comm.barrier()
            entered[0] = 0
            comm.barrier()
            if comm.rank == 1:
                time.sleep(0.05)
                entered[0] = 1
            call(np.ones(nbytes // 8))
            found.append(entered[0])
        comm.close()
        return found

    assert all(all(found) for found in over_tcp(2, body))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_results(n):
    rng = random.Random(n)
    todo = []
    for _ in range(150):
        collective = rng.choice([*cases.ROOTED * 3, *cases.REDUCING, *cases.MOVING])
        name = rng.choice(oracle.DTYPES)
        options = {"root": rng.randrange(n)} if collective in cases.ROOTED else {}
        if collective in cases.REDUCING:
            options["op"] = rng.choice(oracle.ops(name))
        count = rng.choice([0, 1, 3, 17, 255, 1000, 4099, 20_000])
        memory = rng.choice(["new", "out", "misaligned"])
        todo.append(cases.make(collective, name, n, count, memory=memory, **options))

    def body(comm):
        wrong = cases.run_cases(comm, todo)
        comm.close()
        return wrong

    assert over_tcp(n, body) == [[]] * n


def test_arrays_are_the_callers_again():
    def body(comm):
        x = np.empty(4000)
        for i in range(100):
            x[:] = i if comm.rank == 0 else -1
            comm.broadcast(x)
            if not (x == i).all():
                return i
            x[:] = -2
        comm.close()
        return None

    assert over_tcp(3, body) == [None] * 3


def test_a_fast_root_waits_for_a_slow_rank():
    made = shared_float()

    def body(comm):
        comm.barrier()
        seen = []
        for i in range(5 * MOST):
            if comm.rank == 1 and i % MOST == 0:
                time.sleep(0.1)
                seen.append(made[0] - i)
            comm.broadcast(np.ones(4000))
            if comm.rank == 0:
                made[0] = i + 1
        comm.close()
        return seen

    seen = over_tcp(2, body)[1]
    assert max(seen) <= MOST + 1, seen
    assert max(seen) > 1, seen


# name: (field that the error names, what most ranks call, what the odd one calls)
KINDS = {
    "count": ("count", lambda c: c.broadcast(X), lambda c: c.broadcast(np.ones(5))),
    "dtype": ("dtype", lambda c: c.reduce(X), lambda c: c.reduce(np.ones(4, np.int64))),
    "root": ("root", lambda c: c.broadcast(X), lambda c: c.broadcast(X, root=c.rank)),
    "op": ("op", lambda c: c.reduce(X), lambda c: c.reduce(X, "max")),
    "kind": ("kind", lambda c: c.broadcast(X), lambda c: c.reduce(X)),
    "order": ("order", lambda c: c.reduce(X), lambda c: c.reduce(X, order="rank")),
    "barrier": ("kind", lambda c: c.broadcast(X), lambda c: c.barrier()),
    "all_reduce": ("kind", lambda c: c.gather(X), lambda c: c.all_reduce(X)),
    "large": ("count", lambda c: c.broadcast(X), lambda c: c.broadcast(np.ones(400_000))),
    "scan": ("op", lambda c: c.scan(X), lambda c: c.scan(X, "min")),
    "a plan": (
        "dtype",
        lambda c: c.scatter(np.ones(12)),
        lambda c: c.plan("scatter", np.ones(12, np.int64))(np.ones(12, np.int64)),
    ),
}
LATER = {
    "broadcast": lambda c: c.broadcast(np.ones(7)),
    "reduce": lambda c: c.reduce(np.ones(3), root=1),
    "all_reduce": lambda c: c.all_reduce(X),
    "barrier": lambda c: c.barrier(),
    "large": lambda c: c.broadcast(np.ones(100_000)),
    "close": lambda c: c.close(),
}


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", LATER)
def test_a_mismatch_is_raised_by_a_later_call(n, kind, later):
    field, usual, odd = KINDS[kind]

    def body(comm):
        comm.barrier()
        first = odd if comm.rank == n - 1 else usual
        rest = [LATER[later]] * (MOST + 1) + [lambda c: c.close()]
        return failure_of([lambda call=call: call(comm) for call in (usual, first, *rest)])

    for rank, found in enumerate(over_tcp(n, body)):
        assert found is not None, f"rank {rank} heard nothing"
        number, name, text = found
        assert name == "MismatchError", (rank, text)
        assert number >= 1, text
        assert f"'{field}' differs" in text, (rank, text)
        assert re.search(rf"rank {n - 1}: \w+\(.*test_left_early.py:\d+", text), text


def test_the_receiver_hears_of_a_mismatch_at_once():
    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.broadcast(X)
            time.sleep(0.5)
            return failure_of([comm.barrier])
        return failure_of([lambda: comm.broadcast(np.ones(5))])

    for number, name, text in over_tcp(2, body):
        assert (number, name) == (0, "MismatchError")
        assert "rank 0: broadcast(float64[4]" in text
        assert "rank 1: broadcast(float64[5]" in text
        assert "rank 0 had left early" in text


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("refuser", [0, 1, 2])
def test_a_refusal_ends_a_communicator_that_others_may_have_left(later, refuser):
    def refused(comm):
        with pytest.raises(ArgumentError):
            comm.reduce(X, "nonsense")

    def body(comm):
        comm.barrier()
        first = refused if comm.rank == refuser else lambda c: c.reduce(X)
        rest = [LATER[later]] * (MOST + 1) + [lambda c: c.close()]
        return failure_of([lambda call=call: call(comm) for call in (first, *rest)])

    for rank, found in enumerate(over_tcp(3, body)):
        if rank == refuser and later == "close":
            continue  # it knows
        assert found is not None, f"rank {rank} heard nothing"
        number, name, text = found
        assert name == "MismatchError", (rank, text)
        assert f"rank {refuser} has refused a call" in text, (rank, number, text)
        assert "nonsense" in text


def test_a_refusal_that_comes_during_the_call_before():
    """The slow rank hears of it in a call that proves all before, and then leaves this one."""
    large = np.ones(8192)

    def body(comm):
        pids = comm.all_gather(np.array([os.getpid()])).ravel().tolist()
        if comm.rank == 1:
            comm.broadcast(large)
            return failure_of([lambda: comm.reduce(X), comm.barrier])
        time.sleep(0.3)  # until rank 1 waits
        os.kill(pids[1], signal.SIGSTOP)
        comm.broadcast(large)
        with pytest.raises(ArgumentError):
            comm.reduce(X, "nonsense")
        os.kill(pids[1], signal.SIGCONT)
        return failure_of([comm.barrier])

    for number, name, text in over_tcp(2, body):
        assert (number <= 1, name) == (True, "MismatchError")
        assert "rank 0 has refused a call that others may have left early" in text


def test_other_refusals_leave_the_communicator_usable():
    def body(comm):
        for _ in range(20):
            comm.broadcast(X)
            error = ArgumentError if comm.rank == 1 else errors.PeerRejected
            with pytest.raises(error):
                comm.all_reduce(X, "nonsense" if comm.rank == 1 else "sum")
        assert (comm.all_reduce(X) == 3).all()
        comm.close()
        return True

    assert over_tcp(3, body) == [True] * 3


@pytest.mark.parametrize("later", LATER)
def test_a_dead_peer_is_named_with_the_calls_left_early(later):
    def body(comm):
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        found = failure_of([lambda: comm.broadcast(X)])
        rest = [LATER[later]] * (MOST + 1) + [lambda c: c.close()]
        return found or failure_of([lambda call=call: call(comm) for call in rest])

    *found, code = over_tcp(3, body, may_die=[2])
    assert code == -signal.SIGKILL
    for _, name, text in found:
        assert name == PeerLost.__name__, text
        assert "rank 2" in text


def test_the_last_call_is_settled_when_it_is_closed():
    def body(comm):
        comm.barrier()
        return failure_of([lambda: comm.broadcast(X, root=comm.rank), comm.close])

    for _, name, text in over_tcp(3, body):
        assert name == MismatchError.__name__
        assert "'root' differs" in text


def test_closing_waits_for_the_others_and_no_longer_than_calls():
    closed = shared_float()

    def body(comm):
        comm.barrier()
        comm.broadcast(X)
        if comm.rank == 0:
            found = failure_of([comm.close])
            closed[0] = 1
            return found
        while not closed[0]:
            time.sleep(0.01)
        return failure_of([comm.close])

    waited, other = over_tcp(2, body, config=Config(0.5, strict="next"))
    assert waited[1] == CollTimeout.__name__
    assert "has left calls early" in waited[2]
    assert "test_left_early.py:" in waited[2]
    assert other is None


def test_who_closes_before_a_call_of_the_others_is_named():
    def body(comm):
        comm.barrier()
        calls = [] if comm.rank == 1 else [lambda: comm.broadcast(X)]
        return failure_of([*calls, comm.close])

    early, other = over_tcp(2, body)
    assert early[1] == "PeerLeft"
    assert other is None


def test_a_communicator_that_is_dropped_does_not_wait():
    def body(comm):
        part = comm.dup()
        part.broadcast(X)
        if comm.rank == 0:
            del part
        comm.barrier()
        comm.close()
        return True

    assert over_tcp(2, body) == [True] * 2


def test_parts_of_a_communicator():
    def body(comm):
        part = comm.split(comm.rank % 2)
        for i in range(30):
            x = np.full(3, float(i if part.rank == i % 2 else -1))
            part.broadcast(x, root=i % 2)
            comm.reduce(X, root=i % 4)
            if x[0] != i:
                return i
        part.close()
        comm.close()
        return None

    assert over_tcp(4, body) == [None] * 4


def test_messages_between_calls():
    def body(comm):
        for i in range(40):
            comm.broadcast(X)
            if comm.rank == 0:
                comm.send(np.full(2, i), 1)
            elif comm.rank == 1:
                x = np.empty(2, np.int64)
                comm.recv(x, 0)
                assert (x == i).all()
        comm.close()
        return True

    assert over_tcp(3, body) == [True] * 3


def test_the_setting():
    assert Config().strict == "call"
    assert Config.from_env({"PYCOLL_STRICT": "next"}).strict == "next"
    assert repr(Config()) != repr(NEXT)  # which ranks compare as they meet
    with pytest.raises(ArgumentError, match="strict is 'never'; accepted: call, next"):
        Config(strict="never")
