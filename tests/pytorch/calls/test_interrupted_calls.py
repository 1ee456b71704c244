"""An interrupt inside an operation ends the group, at whatever line: else ranks are out of step."""

import linecache
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402
import worlds_torch  # noqa: E402
from worlds_torch import run_group  # noqa: E402

FOLDER = Path(pycoll.torch.__file__).parent
OUTSIDE = ("rank", "size", "send", "recv")  # what comes before a call has begun
EARLY = ("try:", "buffer = None")


class Stop(KeyboardInterrupt):
    """What the tests interrupt with."""


def stop(*_):
    raise Stop


def interrupting(number):
    """Return a trace function that raises before the n-th line of the backend, and which that is.

    Where a ``try`` stands Python looks for no signals, and before it nothing has begun.
    """
    lines, place = [0], [""]

    def tracer(frame, event, arg):
        def local(frame, event, arg):
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and text not in EARLY:
                lines[0] += 1
                if lines[0] == number:
                    place[0] = text
                    raise Stop
            return local

        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        ours = FOLDER in file.parents and file.name != "work.py"  # that of a call that is over
        return local if ours and name not in OUTSIDE else None

    return tracer, place


X, Y = torch.ones(4), torch.zeros(4)
CALLS = {
    "all_reduce": lambda g: dist.all_reduce(Y, group=g),
    "reduce_scatter": lambda g: dist.reduce_scatter_tensor(Y, X, group=g),
    "broadcast": lambda g: dist.broadcast(Y, 0, group=g),
    "all_gather": lambda g: dist.all_gather_into_tensor(Y, X, group=g),
    "all_to_all": lambda g: dist.all_to_all_single(Y, X, group=g),
    "reduce": lambda g: dist.reduce(Y, 0, group=g),
    "list all_gather": lambda g: dist.all_gather([Y], X, group=g),
    "list reduce_scatter": lambda g: dist.reduce_scatter(Y, [X], group=g),
    "list all_to_all": lambda g: dist.all_to_all([Y], [X], group=g),
    "gather": lambda g: dist.gather(X, [Y], 0, group=g),
    "scatter": lambda g: dist.scatter(Y, [X], 0, group=g),
    "coalesced": lambda g: dist.all_reduce_coalesced([Y, X.clone()], group=g),
    "barrier": lambda g: dist.barrier(group=g),
    "irecv": lambda g: dist.irecv(Y, 0, group=g, tag=1),
    "send": lambda g: g.send([X], 0, 2).wait(),
    "recv": lambda g: (g.send([X], 0, 3), g.recv([Y], 0, 3).wait()),
}
HOT = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")


def interrupted_at(number, call, warm):
    """Interrupt a call of a new group before the n-th line.

    Returns:
        The line, empty if there is none, and what the next call of the group says.
    """
    group = dist.new_group([0])
    for _ in range(warm):
        call(group)
    tracer, place = interrupting(number)
    sys.settrace(tracer)
    try:
        call(group)
    except Stop:
        pass
    finally:
        sys.settrace(None)
    try:
        dist.all_reduce(X.clone(), group=group)
        said = "nothing"
    except dist.DistBackendError as error:
        said = str(error)
    dist.destroy_process_group(group)
    return place[0], said


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "warm"), [*((kind, 0) for kind in CALLS), *((kind, 2) for kind in HOT)]
)
def test_an_interrupt_before_each_line(kind, warm):
    def body(rank, n):
        number, missed = 0, {}
        while True:
            number += 1
            where, said = interrupted_at(number, CALLS[kind], warm)
            if not where:
                return number, missed
            if "was interrupted (Stop)" not in said:
                missed[number] = where, said

    ((number, missed),) = run_group(1, body, timeout=100)
    assert number > 5, "the lines were not traced"
    assert not missed


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_an_interrupt_of_a_call_like_earlier_ones_is_told(hosts, monkeypatch):
    """The peers would get a wrong sum: of this call and the next one of the rank."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        group, x = dist.group.WORLD, torch.ones(3)
        for _ in range(2):
            dist.all_reduce(x)
        if rank == 0:
            group._caller.calls.sites.here = stop  # between the first line and the engine
            with pytest.raises(Stop):
                dist.all_reduce(x)
            del group._caller.calls.sites.here
        with pytest.raises(dist.DistBackendError, match=r"rank 0 was interrupted \(Stop\)"):
            dist.all_reduce(x)

    run_group(2, body)


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_an_interrupt_of_a_receive_that_has_been_posted(hosts, monkeypatch):
    """Nobody holds its tensor any more, and the message would land in memory of others."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        session = dist.group.WORLD._caller.session

        def posted_and_stopped(function, *args):
            del session.guard
            session.guard(function, *args)
            raise Stop

        if rank == 0:
            x = torch.zeros(1000)
            session.guard = posted_and_stopped
            with pytest.raises(Stop):
                dist.recv(x, 1)
        else:
            time.sleep(0.3)
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match=r"rank 0 was interrupted \(Stop\)"):
                dist.send(torch.ones(1000), 1) if rank == 0 else wait_for_end()
        return bool(x.any()) if rank == 0 else False

    def wait_for_end():
        dist.send(torch.ones(1000), 0)
        dist.recv(torch.ones(1), 0)

    assert run_group(2, body) == [False] * 2


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_an_interrupt_of_a_wait_for_a_message_ends_the_group(hosts, monkeypatch):
    """The receive would take the message that is for the next one."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        x = torch.zeros(3)
        if rank == 0:
            work = dist.irecv(x, 1)
            work._finish = stop
            with pytest.raises(Stop):
                work.wait()
        with pytest.raises(dist.DistBackendError, match=r"rank 0 was interrupted \(Stop\)"):
            dist.recv(torch.zeros(3), 1 - rank)
        return x.tolist()

    assert run_group(2, body) == [[0.0] * 3] * 2
