"""Counters, and what Prometheus gets of them."""

import os
import signal
import socket
import urllib.error
import urllib.request

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.errors import ArgumentError, PeerLost, PeerRejected
from pycoll.observe.counters.metrics import all_stats
from pycoll.testing import run_processes, run_threads


def test_counters_are_what_happened():
    def rank(comm):
        before = comm.stats().calls
        for _ in range(5):
            comm.barrier()
        x = comm.zeros(1 << 20, np.uint8)
        with pytest.raises(ArgumentError if comm.rank else PeerRejected):
            comm.all_reduce(np.ones(2), op="nonsense" if comm.rank else "sum")
        stats = comm.stats()
        assert (stats.rank, stats.world_size, stats.transport) == (comm.rank, 2, "shared memory")
        assert stats.symmetric_bytes >= x.nbytes
        assert stats.collectives == {}
        return stats.calls - before

    assert run_processes(2, rank) == [6, 6]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_prometheus_gets_them(address):
    """At the address that was asked for, and at no other."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(comm):
        for _ in range(7):
            comm.barrier()
        comm.barrier()
        url = f"http://{{}}:{port + comm.rank}/metrics"
        with urllib.request.urlopen(url.format(address)) as answer:
            lines = answer.read().decode().splitlines()
        if address != "0.0.0.0":
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(url.format("127.0.0.3"))
        comm.barrier()
        return [line for line in lines if line.startswith("pycoll_calls_total")]

    config = Config(timeout_s=8, heap_bytes=1 << 26, metrics_port=port, metrics_address=address)
    for number, (line,) in enumerate(run_processes(1, rank, config=config)):
        assert line.startswith(f'pycoll_calls_total{{communicator="job",rank="{number}"}}')
        assert float(line.split()[-1]) >= 8


def test_opentelemetry_gets_them(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    def rank(comm):
        reader = InMemoryMetricReader()
        comm.export_metrics(MeterProvider([reader]).get_meter("test"))
        half = comm.split(comm.rank)
        with comm.trace(tmp_path):
            for _ in range(7):
                comm.all_reduce(np.ones(4))
            (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
            found = {m.name: m.data.data_points for m in scope.metrics}
        (bytes_,) = found["pycoll.collective.bytes"]
        assert dict(bytes_.attributes) == {
            "rank": comm.rank,
            "communicator": "job",
            "collective": "all_reduce",
        }
        assert bytes_.value == 7 * 32
        assert [p.value for p in found["pycoll.collective.calls"]] == [7]
        labels = {p.attributes["communicator"]: p.value for p in found["pycoll.calls"]}
        half.close()
        return sorted(labels), labels["job"] >= 7

    assert run_threads(2, rank) == 2 * [(["job", "split1"], True)]


def test_a_label_is_of_one_communicator_for_all_its_life():
    """Also when others are closed, on a rank that is in none of them, and for parts of parts."""

    def rank(comm):
        parts = [comm.split(None if i == 3 and comm.rank else 0) for i in range(6)]
        inner = parts[5].dup()
        for number, part in enumerate(parts, 1):
            for _ in range(10 * number if part is not None else 0):
                part.barrier()
        before = {label: stats.calls for label, stats in all_stats(comm._session)}
        parts[0].close()
        inner.barrier()
        after = {label: stats.calls for label, stats in all_stats(comm._session)}
        return before, after

    first, second = run_processes(2, rank)
    for before, after in (first, second):
        labels = {f"split{i}": 10 * i for i in range(1, 6) if f"split{i}" in before}
        assert before.items() >= labels.items()
        assert after["split6.1"] == before["split6.1"] + 1
        assert after.keys() == before.keys() - {"split1"}
        assert all(after[label] == calls for label, calls in labels.items() if label != "split1")
    assert "split4" in first[0]
    assert "split4" not in second[0]
    assert first[0].keys() - {"split4"} == second[0].keys()


def test_prometheus_goes_on_with_those_who_are_left():
    """At the ports of their new ranks, which others of them had before."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(comm):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            comm.barrier()
        new = comm.shrink()
        for _ in range(50):
            new.barrier()
        with urllib.request.urlopen(f"http://127.0.0.1:{port + new.rank}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        new.barrier()
        comm.close()
        (line,) = (line for line in lines if line.startswith("pycoll_calls_total"))
        return line.startswith(f'pycoll_calls_total{{communicator="job",rank="{new.rank}"}} 5')

    config = Config(timeout_s=8, heap_bytes=1 << 26, metrics_port=port)
    assert run_processes(3, rank, config=config, may_die=[0])[1:] == [True, True]
