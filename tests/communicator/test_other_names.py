"""Names and arguments of other libraries: the error says what they are here."""

import inspect
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import pycoll
from pycoll import Communicator, Grid
from pycoll.comm import other_names
from pycoll.runtime.calls import other_arguments
from pycoll.testing import run_threads

ROOT = Path(__file__).resolve().parents[2]


class Other:
    """Something else that sends."""

    def send(self):
        """Send."""


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Get_rank", "rank"),
        ("size", "world_size"),
        ("Allreduce", "all_reduce"),
        ("allreduce_async_", "all_reduce"),
        ("Allgatherv", "all_gather_v"),
        ("Sendrecv", "sendrecv"),
        ("bcast", "broadcast, for objects broadcast_object"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("psum", "all_reduce"),
        ("mean", 'all_reduce(x, "avg")'),
        ("Ibcast", "broadcast, with async_op=True"),
        ("Ireduce_scatter_block", "reduce_scatter, with async_op=True"),
        ("Iallgatherv", "all_gather_v"),  # which takes no async_op
        ("Idup", "dup"),
        ("Abort", "abort, after which calls raise; to end the job, raise an exception"),
        ("batch_isend_irecv", "isend and irecv, and pycoll.wait_all"),
        ("timeout", "timeout= of pycoll.init and of each call, or PYCOLL_TIMEOUT"),
        ("_fast_", ""),
        ("frobnicate", ""),
    ],
)
def test_a_name_from_elsewhere(name, here):
    assert other_names.name_here(name, Communicator) == here


GRID = dir(Grid)


def test_what_the_table_says_exists():
    for here in (*other_names._NAMES.values(), *other_arguments._WORDS.values()):
        word = re.split(r"[(=., ]", here)[0]
        assert word in (
            *dir(Communicator),
            *GRID,
            "a",
            "x",
            "out",
            "op",
            "tag",
            "src",
            "dst",
            "root",
            "timeout",
        ) or (word in ("color", "async_op", "recv_tag", "counts", "the")), here


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.Get_size(), "has no attribute 'Get_size'; here it is world_size$"),
        (lambda c: c.Iallreduce([1]), r"'Iallreduce'; here it is all_reduce, with async_op=True$"),
        (lambda c: c.neighbor_alltoall([1]), r"here it is grid\(shape\).neighbor_all_to_all$"),
        (lambda c: c.send([1], dest=0), "unexpected keyword argument 'dest'; here it is dst$"),
        (lambda c: c.broadcast([1], root_rank=0), "'root_rank'; here it is root$"),
        (lambda c: c.all_gather_v([1], recvbuf=0), "'recvbuf'; here it is out$"),
        (lambda c: c.broadcast_object(obj=0), "'obj'; here it is x$"),
        (lambda c: c.recv(), "argument: 'x'; here it is recv.x, src.*recv_object.src. for objects"),
        (lambda c: c.all_gather([1], [0]), "but 3 were given; the array .* by name, as out=$"),
        (lambda c: c.all_to_all_v([1], [1], [0]), "were given; the array .* by name, as out=$"),
        (lambda c: c.barrier(1), "were given$"),
        (lambda c: c.all_gather_object([1], 2), "were given; the list of all .* what it returns$"),
        (lambda c: c.all_reduce([1], axis=0), "'axis'; ranks are combined element by element, or"),
        (lambda c: c.all_gather([1], recvcounts=[1]), "'recvcounts'; .* send: all_gather_v.x., "),
        (lambda c: c.gather([1], gather_list=[]), "'gather_list'; here it is out, one array$"),
        (lambda c: pycoll.init(backend="nccl"), "'backend'; pycoll.init.. takes none: it goes by"),
        (lambda c: pycoll.init(rank=0), "takes none: the launcher tells it, such as `pycoll run"),
        (lambda c: pycoll.init(colour=3), "keyword argument 'colour'$"),
        (lambda c: c.all_reduce([1], average=True), 'here it is op="avg"$'),
        (lambda c: c.recv_object(status=None), "here it is probe.src., before the call$"),
        (lambda c: pycoll.Communicator(), "comm = pycoll.init.. gives the communicator"),
        (lambda c: c.barrier(async_op=True).Test(), "no attribute 'Test'; here it is done..$"),
        (lambda c: c.isend([1], 0).result(), "'result'; here it is wait..$"),
        (lambda c: c.barrier(async_op=True).frob(), "no attribute 'frob'$"),
        (lambda c: c.frobnicate(), "has no attribute 'frobnicate'$"),
        (lambda c: c.send([1], dst=0, colour=3), "keyword argument 'colour'$"),
        (lambda c: Other().send(dest=0), "'dest'$"),
    ],
)
def test_an_error_that_a_habit_makes(call, said):
    def rank(comm):
        with pytest.raises((AttributeError, TypeError)) as found:
            call(comm)
        assert found.value.__context__ is None or found.value.__suppress_context__  # told once
        other_names.explain(found.value)  # which adds nothing to what has been explained
        return str(found.value)

    assert re.search(said, run_threads(1, rank)[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timeout", "'timeout'; here it is timeout= of pycoll.init and of each call, or PYCOLL_TI"),
        ("size", "no attribute 'size'; here it is world_size$"),
        ("rank", "rank|can't set attribute"),  # a property, of which Python says so
    ],
)
def test_names_from_elsewhere_are_not_set(name, said):
    """`comm.timeout = 5` would look as if it set a limit; names of the program's own are free."""

    def rank(comm):
        with pytest.raises(AttributeError, match=said):
            setattr(comm, name, 5)
        comm.colour = comm  # a circle
        return name in vars(comm)

    assert run_threads(1, rank) == [False]


def test_signatures_and_texts_name_the_number_for_any_rank():
    assert "src: 'int' = pycoll.ANY" in str(inspect.signature(Communicator.recv))
    assert f"{pycoll.ANY} {pycoll.ANY!r}" == "pycoll.ANY pycoll.ANY"


def test_arguments_are_explained_without_a_launcher_and_to_the_peers():
    def rank(comm):
        with pytest.raises(TypeError, match=r"'dest'; here it is dst$"):
            comm.send([1], dest=0)
        if comm.rank:
            with pytest.raises(pycoll.PeerRejected) as found:
                comm.all_reduce([1])
        else:
            with pytest.raises(TypeError) as found:
                comm.all_reduce([1], dim=0)
        return str(found.value)

    own, told = run_threads(2, rank)
    assert own.endswith(
        "'dim'; ranks are combined element by element, or joined along the first axis"
    )
    assert own in told


def test_python_has_no_other_suggestion():
    """It would name `_fast` for `bcast`, and says what is near where we have nothing to say."""

    def rank(comm):
        found = []
        for name in ("bcast", "barier"):
            try:
                getattr(comm, name)
            except AttributeError as error:
                found.append("".join(traceback.format_exception_only(error)))
        return found

    ours, near = run_threads(1, rank)[0]
    assert ours.endswith("here it is broadcast, for objects broadcast_object\n")
    assert "barier" in near
    assert "_fast" not in near


def test_what_raises_inside_of_a_property_is_not_explained():
    class Odd(other_names.NamesFromElsewhere):
        @property
        def rank(self):
            return self._nothing

    with pytest.raises(AttributeError, match=r"no attribute 'rank'$"):
        _ = Odd().rank


def test_a_grid_knows_the_names_too():
    def rank(comm):
        grid = comm.grid((1,))
        with pytest.raises(AttributeError, match=r"here it is close$"):
            grid.Free()
        with pytest.raises(AttributeError, match=r"no attribute 'size'$"):
            _ = grid.size  # nor world_size
        grid.close()

    run_threads(1, rank)


def test_the_launcher_explains(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import pycoll; pycoll.init().all_reduce_(1)")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "1", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    said = "no attribute 'all_reduce_'; here it is all_reduce\n"  # not __reduce__, as None has it
    assert said in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("all_reduce", "comm = pycoll.init.., and comm has it as all_reduce$"),
        ("COMM_WORLD", "comm = pycoll.init.. gives the communicator of all ranks$"),
        ("frobnicate", "module 'pycoll' has no attribute 'frobnicate'$"),
        ("SUM", 'here it is op="sum"$'),
        ("PROC_NULL", "here it is None, as dst or src of comm.sendrecv$"),
        ("ANY_SOURCE", "here it is pycoll.ANY$"),
        ("get_unique_id", "comm = pycoll.init.. gives the communicator of all ranks$"),
        ("Average", 'here it is op="avg"$'),
    ],
)
def test_a_name_that_the_module_lacks(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(pycoll, name)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("from pycoll import MPI", ": comm = pycoll.init.. gives the communicator of all ranks$"),
        ("from pycoll import all_reduce", ": comm = pycoll.init.., and comm has it as all_reduce$"),
        ("from pycoll import frobnicate", r"__init__.py.$"),
        ("from pycoll.errors import MPI", r"errors.py.$"),
    ],
)
def test_a_name_that_is_imported_from_the_module(wrong, said):
    with pytest.raises(ImportError) as found:
        exec(wrong)
    other_names.explain(found.value)
    assert re.search(said, str(found.value))


def test_a_program_of_torch_distributed():
    text = "Error initializing torch.distributed using env:// rendezvous: RANK expected"
    error = ValueError(text)
    other_names.explain(error)
    assert str(error) == f"{text}; torchrun sets it, or `pycoll run` with --hosts"
