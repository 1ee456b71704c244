"""Memory that a container may have: asked for before it is used, since the kernel kills."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pycoll import _C
from pycoll.config import Config
from pycoll.runtime.startup.bootstrap import make_memfd
from pycoll.runtime.startup.make_groups import open_control
from pycoll.testing import run_processes

MIB = 1 << 20
PROC = {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"}
V1_STAT = "total_inactive_file 1000\nx\ntotal_active_file 500\ntotal_shmem 7\n"
V2_STAT = "anon 12\ninactive_file 1000\nactive_file 500\nshmem 7\n"
ROWS = "24 1 0:22 / / rw shared:1 - ext4 /dev/vda rw\n"
V2_MOUNT = ROWS + "31 24 0:27 {} /groups rw,nosuid shared:9 master:4 - cgroup2 cgroup2 rw\n"
V1_MOUNT = ROWS + "35 31 0:32 {} /groups rw - cgroup cgroup rw,cpu\n".replace("/groups", "/cpu")
V1_MOUNT += "36 31 0:33 {} /groups rw - cgroup cgroup rw,memory\n"


def available(root, proc, groups):
    for name, text in (PROC | proc).items():
        path = root / "proc" / ("self" if name != "meminfo" else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in groups.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return _C.available_memory(str(root))


def v2(limit, usage, at=""):
    values = {"memory.max": limit, "memory.current": usage, "memory.stat": V2_STAT}
    return {at + name: f"{value}\n" for name, value in values.items()}


def v1(limit, usage, at=""):
    values = {"limit_in_bytes": limit, "usage_in_bytes": usage, "stat": V1_STAT}
    return {f"{at}memory.{name}": f"{value}\n" for name, value in values.items()}


def test_without_limits(tmp_path):
    assert available(tmp_path, {}, {}) == 4000 * 1024
    proc = {"cgroup": "0::/a\n", "mountinfo": V2_MOUNT.format("/")}
    assert available(tmp_path, proc, v2("max", 800_000, "a/")) == 4000 * 1024


def test_without_anything(tmp_path):
    assert _C.available_memory(str(tmp_path)) == 2**64 - 1


@pytest.mark.parametrize("group", ["/a/b", "/a/b/c/d"])
def test_the_tightest_of_the_groups_above(tmp_path, group):
    proc = {"cgroup": f"1:name=systemd:/other\n0::{group}\n", "mountinfo": V2_MOUNT.format("/")}
    groups = v2(900_000, 10_000, "a/b/") | v2(500_000, 300_000, "a/") | v2("max", 1)
    assert available(tmp_path, proc, groups) == 500_000 - (300_000 - 1500)


@pytest.mark.parametrize("group", ["/", "/../../elsewhere", "/docker/123"])
def test_a_container_that_sees_its_own_group(tmp_path, group):
    mount = V2_MOUNT.format("/docker/123" if group == "/docker/123" else "/")
    proc = {"cgroup": f"0::{group}\n", "mountinfo": mount}
    assert available(tmp_path, proc, v2(500_000, 300_000)) == 201_500


def test_below_the_group_that_is_mounted(tmp_path):
    proc = {"cgroup": "0::/docker/123/job\n", "mountinfo": V2_MOUNT.format("/docker/123")}
    groups = v2("max", 300_000) | v2(400_000, 300_000, "job/")
    assert available(tmp_path, proc, groups) == 101_500


@pytest.mark.parametrize("names", ["memory", "cpu,memory,pids"])
def test_the_first_version(tmp_path, names):
    proc = {
        "cgroup": f"5:devices:/no\n4:{names}:/a\n0::/\n",
        "mountinfo": V1_MOUNT.format("/", "/") + V2_MOUNT.format("/").replace("groups", "unified"),
    }
    groups = v1(2**63 - 4096, 600_000) | v1(500_000, 300_000, "a/")
    assert available(tmp_path, proc, groups) == 201_500


def test_more_in_use_than_allowed(tmp_path):
    proc = {"cgroup": "0::/\n", "mountinfo": V2_MOUNT.format("/")}
    assert available(tmp_path, proc, v2(500_000, 600_000)) == 0
    assert available(tmp_path, proc, v2(500_000, 1_000)) == 500_000  # of which caches


@contextlib.contextmanager
def limited_group(nbytes):
    """A control group of this machine with a limit; skips where none can be made."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
    first = "memory" in own
    base = Path("/sys/fs/cgroup/memory" if first else "/sys/fs/cgroup")
    group = base / own["memory" if first else ""].lstrip("/") / f"pycoll-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if first else "memory.max")
        if not limit.exists():
            pytest.skip("this control group cannot limit memory")
        limit.write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()


FILL = """
import os, numpy as np, pycoll
comm = pycoll.init()
kept = []
try:
    while True:
        kept.append(comm.empty(32 << 20, np.uint8))
except MemoryError as error:
    os.write(1, f"{len(kept)} {error}\\n".encode())  # at once: ranks may share a pipe
"""


def test_ranks_that_fill_a_container_are_told(tmp_path):
    script = tmp_path / "fill.py"
    script.write_text(FILL)
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", str(script)]
    with limited_group(500 * MIB) as group:
        enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", enter, "sh", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stdout
    texts = [line for line in done.stdout.splitlines() if "bytes are available" in line]
    assert len(texts) == 2, done.stdout
    counts = [int(text.split()[1] if text.startswith("[") else text.split()[0]) for text in texts]
    assert 1 < sum(counts) < 500 / 32


@contextlib.contextmanager
def no_more_memory():
    """No address space beyond what this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_array_stays_registered_while_there_is_no_memory_to_move_it_back():
    def rank(comm):
        x = np.ones(50 * MIB, np.uint8)
        comm.register(x)
        with no_more_memory(), pytest.raises(MemoryError, match="to move an array back"):
            comm.unregister(x)
        comm.all_reduce(x, out=x)
        comm.unregister(x)
        comm.register(x)
        return x[0] == x[-1] == 2

    assert run_processes(2, rank) == [True, True]


def test_memory_that_ends_while_there_is_none_to_move_it_back_is_forgotten():
    def rank(comm):
        x = np.ones(50 * MIB, np.uint8)
        address = x.ctypes.data
        comm.register(x)
        told = []
        with no_more_memory(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda hook: told.append(hook.exc_value))
            patch.setattr(sys, "excepthook", lambda _, error, __: told.append(error))
            del x
        x = np.full(50 * MIB, comm.rank, np.uint8)
        assert x.ctypes.data == address  # else this proves nothing
        assert [type(error) for error in told] == [MemoryError]
        comm.all_reduce(x, out=x)
        comm.register(x)
        return int(x.max()), int(x.min())

    assert run_processes(2, rank) == [(1, 1)] * 2


def test_who_comes_after_a_creator_that_died_half_way():
    """It had given the file its size, and had not asked for the memory yet."""
    whole, half = make_memfd("control"), make_memfd("control")
    try:
        open_control(whole, 2, Config())
        os.ftruncate(half, os.fstat(whole).st_size)
        open_control(half, 2, Config())
        assert os.fstat(half).st_blocks == os.fstat(whole).st_blocks
    finally:
        os.close(whole)
        os.close(half)
