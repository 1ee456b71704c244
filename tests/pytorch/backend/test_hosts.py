"""Process groups on several hosts: shared memory inside, TCP or MPI between."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import mpirun  # noqa: E402
import namespaces  # noqa: E402
import pycoll.torch  # noqa: E402
import worlds_torch  # noqa: E402
from faults import BOUND_S, Event  # noqa: E402
from pycoll.errors import TransportError  # noqa: E402
from pycoll.runtime.startup import tcp_connections  # noqa: E402
from pycoll.runtime.startup.tcp_handshake import Handshakes  # noqa: E402
from pycoll.testing import run_processes  # noqa: E402
from worlds_torch import run_group  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's own, at import
    from torch_clients.cases import CASES
from torch_hosts_program import every_operation  # noqa: E402

LAYOUTS = {"1,1": 2, "1,2": 3, "2,2": 4}
PROGRAM = Path(__file__).resolve().parents[2] / "support/torch_hosts_program.py"


def fails(*given):
    raise TransportError("nothing is left")


@pytest.mark.parametrize("part", [(tcp_connections, "open_api"), (Handshakes, "run")])
def test_a_rank_that_cannot_be_connected(monkeypatch, tmp_path, part):
    """The others hear of it from the store, long before their time is over."""

    def rank(comm):
        worlds_torch.take_host(comm.rank)
        if comm.rank == 1:
            monkeypatch.setattr(*part, fails)
        store, limit = dist.FileStore(str(tmp_path / "store"), 3), timedelta(seconds=100)
        place = {"store": store, "rank": comm.rank, "world_size": 3, "timeout": limit}
        with pytest.raises(dist.DistBackendError) as told:
            dist.init_process_group("pycoll", **place)
        return str(told.value)

    for number, text in enumerate(run_processes(3, rank, timeout=30)):
        assert "nothing is left" in text
        assert number == 1 or re.search(r"rank 1.* cannot join", text)


def test_a_group_without_a_secret(monkeypatch, pretend):
    """Rank 0 says what can happen and what to do; with one, nobody says anything."""
    pretend("1,1")

    def body(rank, n):
        with warnings.catch_warnings(record=True) as told:
            dist.new_group([0, 1])
        return [str(w.message) for w in told if issubclass(w.category, RuntimeWarning)]

    assert run_group(2, body) == [[], []]
    monkeypatch.delenv("PYCOLL_SECRET")
    (text,), none = run_group(2, body)
    assert none == []
    assert "whoever can reach the port of MASTER_ADDR) can pose as a rank" in text
    assert "Set PYCOLL_SECRET to the same random text on all hosts" in text


@pytest.mark.parametrize("secret", ["", "what somebody else uses", "short"])
def test_another_secret(monkeypatch, tmp_path, secret):
    def rank(comm):
        worlds_torch.take_host(comm.rank)
        if comm.rank == 1:
            monkeypatch.setenv("PYCOLL_SECRET", secret)
        store, limit = dist.FileStore(str(tmp_path / "store"), 2), timedelta(seconds=100)
        place = {"store": store, "rank": comm.rank, "world_size": 2, "timeout": limit}
        with pytest.raises((dist.DistBackendError, ValueError), match="PYCOLL_SECRET"):
            dist.init_process_group("pycoll", **place)

    run_processes(2, rank, timeout=20)


def numbers(layout):
    """Return the host of each rank for a layout such as ``"2,1"``, ranks on each host."""
    return tuple(i for i, size in enumerate(layout.split(",")) for _ in range(int(size)))


@pytest.fixture
def pretend(monkeypatch):
    """Return a function that makes several hosts of this one."""
    return lambda layout: monkeypatch.setattr(worlds_torch, "HOSTS", numbers(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation(pretend, layout):
    pretend(layout)
    assert run_group(LAYOUTS[layout], every_operation) == [True] * LAYOUTS[layout]


def test_how_ranks_reach_each_other(pretend):
    def body(rank, n):
        near = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        far = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        x = torch.ones(3)
        for group in (near, far):
            dist.all_reduce(x, group=group)
        assert (x == 4).all()
        return [group._caller.session.transport for group in (dist.group.WORLD, near, far)]

    pretend("2,2")
    for world, near, far in run_group(4, body):
        assert world == "TCP between hosts of 2+2 ranks, shared memory inside"
        assert near == "shared memory"
        assert far == "TCP, messages between all ranks"


def test_the_same_bits_as_on_one_host(pretend):
    def body(rank, n):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(rank))
        dist.all_reduce(x)
        return x

    one = run_group(4, body)
    pretend("2,2")
    assert all(torch.equal(a, b) for a, b in zip(one, run_group(4, body), strict=True))


@pytest.mark.parametrize("name", ["DDP", "FSDP2 with clip_grad_norm_", "pipelining, 1F1B"])
def test_a_client(pretend, name):
    near = run_group(2, CASES[name], timeout=100)
    pretend("1,1")
    assert run_group(2, CASES[name], timeout=100) == near


X = torch.ones(100)
WAITS = {
    "all_reduce": lambda: dist.all_reduce(X),
    "all_reduce in the background": lambda: dist.all_reduce(X, async_op=True).wait(),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(10**6)),
    "all_gather": lambda: dist.all_gather([torch.ones(3) for _ in range(3)], torch.ones(3)),
    "barrier": lambda: dist.barrier(),
    "recv": lambda: dist.recv(torch.ones(3), 1),
    "recv from any rank": lambda: dist.recv(torch.ones(3)),
    "large send": lambda: dist.send(torch.ones(10**6), 1),
}


def dies(waits):
    event = Event()

    def body(rank, n):
        dist.all_reduce(X)
        if rank == 1:
            time.sleep(0.2)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 \(process \d+") as caught:
            WAITS[waits[0]]()
        assert event.age() < BOUND_S
        for name in waits[1:]:
            with pytest.raises(dist.DistBackendError):
                WAITS[name]()
        return str(caught.value)

    first, code, third = run_group(3, body, may_die=[1])
    assert code == -signal.SIGKILL
    for rank, text in ((0, first), (2, third)):
        assert f"on rank {rank} of 3" in text
        assert "died" in text


@pytest.mark.parametrize("layout", ["1,2", "2,1"])  # it has company on its host, or is alone
def test_a_killed_rank(pretend, layout):
    pretend(layout)
    dies(list(WAITS))
    dies(list(WAITS)[:3:-1][1:])  # a large send may be on its way already


def test_a_call_that_does_not_match(pretend):
    pretend("1,2")

    def body(rank, n):
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match="MismatchError") as caught:
            dist.broadcast(X, 0) if rank == 0 else dist.all_reduce(X)
        return str(caught.value)

    for text in run_group(3, body):
        assert "broadcast" in text
        assert "all_reduce" in text
        assert "test_hosts.py" in text


def test_a_rank_that_does_not_call(pretend):
    pretend("1,2")

    def body(rank, n):
        if rank == 0:
            time.sleep(2.5)
            return ""
        start = time.monotonic()
        with pytest.raises(pycoll.torch.BackendTimeout, match="gave up after waiting") as caught:
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(1))
        assert time.monotonic() - start < 0.5 + 8 * BOUND_S  # rank 0 has a second to answer
        return str(caught.value)

    _, *texts = run_group(3, body, limit_s=0.5)
    assert all("rank 0: does not answer" in text for text in texts), texts


def test_a_rank_that_leaves(pretend):
    pretend("1,2")

    def body(rank, n):
        dist.barrier()
        if rank == 0:
            dist.destroy_process_group()
            return
        with pytest.raises(dist.DistBackendError, match=r"rank 0(.|\n)*closed"):
            dist.all_reduce(X)

    run_group(3, body)


def finish(processes, timeout=100):
    """Wait for processes; return what all of them have written."""
    try:
        texts = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
    assert not any(p.returncode for p in processes), "\n".join(texts)
    return "\n".join(texts)


def start(command, **variables):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = mpirun.environment(OMP_NUM_THREADS="1", **variables)
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


@pytest.mark.parametrize("pretended", ["2,1", ""])
def test_an_mpi_launcher(pretended):
    if reason := mpirun.missing():
        pytest.skip(reason)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [*mpirun.command(3), sys.executable, str(PROGRAM)]
    words += map(str, numbers(pretended) if pretended else ())
    text = finish([start(words, **place)])
    assert text.count("between hosts of 2+1 ranks" if pretended else ": shared memory") == 3
    assert "TCP" not in text


@pytest.fixture
def two_hosts():
    """Return the names of two network namespaces that are joined by a cable."""
    with namespaces.two_hosts() as names:
        yield names


def test_torchrun_on_two_hosts(two_hosts):
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
    ]
    words += ["--master-addr", "10.78.0.1", "--master-port", "29555"]
    nodes = []
    for i, name in enumerate(two_hosts):
        inside = ["ip", "netns", "exec", name, "unshare", "-u", "-i", "sh", "-c"]
        shell = f'hostname host{i}; exec "$@"'
        nodes.append(start([*inside, shell, "sh", *words, "--node-rank", str(i), str(PROGRAM)]))
    text = finish(nodes)
    for rank in range(4):
        place = "TCP between hosts of 2+2 ranks, shared memory inside"
        assert f"rank {rank} on host{rank // 2}: {place}" in text
