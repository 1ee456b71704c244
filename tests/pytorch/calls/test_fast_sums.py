"""Sums that were made before go straight to the engine; what is odd about a tensor still counts."""

import _thread
import time
import warnings
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.torch import BackendTimeout  # noqa: E402
from worlds_torch import run_group  # noqa: E402

COUNT = 10_000


def warm(count=COUNT):
    for _ in range(2):
        dist.all_reduce(torch.ones(count))


def usable(n):
    x = torch.ones(COUNT)
    dist.all_reduce(x)
    return bool((x == n).all())


@pytest.mark.parametrize("left", [0, COUNT - 1, 55_000, 59_999])
@pytest.mark.parametrize("first", [0, 50_000])
def test_storage_that_was_made_smaller(first, left):
    """A view of it is then a pointer to anything."""

    def body(rank, n):
        warm()
        whole = torch.ones(100_000)
        x = whole[first : first + COUNT]
        whole.untyped_storage().resize_(4 * left)
        if left < first + COUNT:
            with pytest.raises(ValueError, match=r"40000 bytes(.|\n)*has been freed"):
                dist.all_reduce(x)
        else:
            dist.all_reduce(x)
        return usable(n)

    assert run_group(2, body) == [True] * 2


def test_a_thread_with_no_line_of_the_program():
    """Nobody has called what it calls, as in a thread of C++."""

    def body(rank, n):
        warm()
        x, ended = torch.ones(COUNT), torch.ones(2)
        _thread.start_new_thread(dist.all_reduce, (x,))
        until = time.monotonic() + 10
        while not (x == n).all() and time.monotonic() < until:
            time.sleep(0.001)
        dist.all_reduce(ended)
        return bool((x == n).all()) and usable(n)

    assert run_group(2, body) == [True] * 2


def test_views_of_a_tensor_without_memory():
    def body(rank, n):
        from torch._subclasses.fake_tensor import FakeTensorMode

        warm()
        warnings.simplefilter("ignore")  # that it has no address
        with FakeTensorMode():
            x = torch.ones(100_000)[50_000 : 50_000 + COUNT]
            calls = dist.all_reduce, lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)
            for call in calls:
                with pytest.raises(dist.DistBackendError, match="FakeTensor without"):
                    call(x)
        return usable(n)

    assert run_group(2, body) == [True] * 2


def test_nested_tensors():
    def body(rank, n):
        warm(6)
        warnings.simplefilter("ignore")  # they are on their way in
        sizes = (2, 4) if rank == 0 else (3, 3)
        nested = torch.nested.nested_tensor([torch.ones(k) for k in sizes])
        with pytest.raises(ValueError, match="nested"):
            dist.all_reduce(nested)
        assert [t.sum().item() for t in nested.unbind()] == list(map(float, sizes))
        return usable(n)

    assert run_group(2, body) == [True] * 2


def test_sums_are_bound_by_who_holds_the_lock():
    """A thread of the group may be binding another call."""

    def body(rank, n):
        group, held = dist.group.WORLD, []
        bind = group._caller.calls.bind

        def watched(*args):
            held.append(group._caller.lock._is_owned())
            return bind(*args)

        group._caller.calls.bind = watched
        works = [dist.all_reduce(torch.ones(k), async_op=True) for k in range(1, 20)]
        assert all(work.wait() for work in works)
        warm()
        known = {count for _, _, count, _, _ in group._caller.kept}
        return bool(held) and all(held), {*range(1, 20), COUNT} <= known

    assert run_group(2, body) == [(True, True)] * 2


class Forgetful(dict):
    """Forgets at once, as a table does that another thread finds full."""

    def __setitem__(self, key, value):
        """Forget it."""


def test_plans_that_another_thread_forgets():
    def body(rank, n):
        dist.group.WORLD._caller.session.plans._plans = Forgetful()
        return usable(n)

    assert run_group(2, body) == [True] * 2


class Watched:
    """A table of calls that can be made again, which notes whether they are."""

    def __init__(self, plain):
        self.plain, self.ways = plain, []

    def __call__(self, *args):
        self.ways.append("short" if (done := self.plain(*args)) else "long")
        return done

    def __getattr__(self, name):
        return getattr(self.plain, name)


def short_calls(among, *given, **named):
    """Make an all_reduce and return whether it took the short way: past the group's method."""
    caller, plain = among._caller, among._caller.sums
    caller.sums = watched = Watched(plain)
    try:
        work = dist.all_reduce(*given, **named)
        if work is not None:
            work.wait()
    finally:
        caller.sums = plain
    return watched.ways


class Watching(torch.overrides.TorchFunctionMode):
    """Sees what PyTorch calls."""

    def __init__(self):
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Note a function, and call it."""
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_what_goes_the_short_way():
    def body(rank, n):
        group, sums = dist.group.WORLD, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        for op in sums:
            dist.all_reduce(torch.ones(6), op)
        for op in sums:
            for x in (torch.ones(6), torch.ones(2, 3), torch.ones(9)[3:]):
                assert short_calls(group, x, op) == ["short"]
                assert x.eq(n if op == sums[0] else 1).all()
            assert short_calls(group, torch.ones(6), op=op, group=group) == ["short"]
        odd = {
            "type": torch.ones(6, dtype=torch.float64),
            "size": torch.ones(7),
            "gaps": torch.ones(6, 2)[:, 0],
            "a sign kept apart": torch._neg_view(-torch.ones(6)),
            "a subclass": torch.nn.Parameter(torch.ones(6), requires_grad=False),
        }
        for what, x in odd.items():
            assert "short" not in short_calls(group, x), what
            assert x.eq(n).all(), what
        assert "short" not in short_calls(group, torch.ones(6), dist.ReduceOp.MAX)
        assert "short" not in short_calls(group, torch.ones(6), async_op=True)
        with Watching() as seen:
            dist.all_reduce(torch.ones(6))
        assert dist.all_reduce in seen.functions
        return usable(n)

    assert run_group(2, body) == [True] * 2


def test_short_sums_in_a_coalesced_call():
    def body(rank, n):
        xs = [torch.full((6,), float(i)) for i in range(3)]
        dist.all_reduce(torch.ones(6))
        with dist.distributed_c10d._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
            assert [x[0].item() for x in xs] == [0.0, 1.0, 2.0]
        return [x[0].item() / n for x in xs]

    assert run_group(2, body) == [[0.0, 1.0, 2.0]] * 2


def test_errors_of_short_sums():
    """They have the type and the line of any other."""

    def body(rank, n):
        group = dist.new_group(range(n))
        warm()
        for _ in range(2):
            dist.all_reduce(torch.ones(6), group=group)
        group.set_timeout(timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(BackendTimeout, match=r"test_fast_sums\.py:\d+ body\(\)"):
                dist.all_reduce(torch.ones(6), group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises((ValueError, dist.DistBackendError)):
            dist.all_reduce(torch.ones(6), group=group)
        return usable(n)

    assert run_group(2, body) == [True] * 2
