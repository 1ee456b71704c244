"""Jobs that do not fit are refused before a rank is started."""

import os
import subprocess
import sys
import time

import pytest

from communicator.memory.test_memory_limits import limited_group
from pycoll import _C
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.startup.bootstrap import make_memfd
from pycoll.runtime.startup.make_groups import open_control
from pycoll.runtime.startup.room import RANK_BYTES, check_job, mailbox_bytes


@pytest.mark.parametrize("n", [1, 3, 300])
def test_what_a_job_needs(n):
    config = Config(cell_bytes=64 << 10)
    shared = _C.Control.bytes(n, config.cell_bytes, mailbox_bytes(n))
    need = n * RANK_BYTES + shared
    check_job(n, config, need)
    with pytest.raises(ArgumentError) as told:
        check_job(n, config, need - 1)
    assert f"{n} ranks need at least {need} bytes of memory, and {need - 1} are" in str(told.value)


def test_shared_memory_is_what_was_said():
    fd, config = make_memfd("control"), Config(cell_bytes=64 << 10)
    control = open_control(fd, 3, config)
    assert os.fstat(fd).st_size == _C.Control.bytes(3, config.cell_bytes, mailbox_bytes(3))
    del control
    os.close(fd)


def test_a_rank_needs_what_was_said():
    """And not much more, or the check would be of no use."""
    script = (
        "import pycoll, numpy; c = pycoll.init(); c.barrier(); text = open("
        "'/proc/self/smaps_rollup').read(); print(text.split('Private_Dirty:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert RANK_BYTES * 0.8 < int(done.stdout) * 1024 < RANK_BYTES * 3


def test_a_job_that_does_not_fit_into_a_container(tmp_path):
    """Nobody is killed: no rank has been started."""
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'a').close()")
    with limited_group(1 << 30) as group:

        def join():
            (group / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, "-m", "pycoll", "run", "-n", "200", str(script)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=join
        )
        time.sleep(0.1)  # until the group is empty
    assert done.returncode == 2
    assert "200 ranks need at least" in done.stderr
    assert not (tmp_path / "started").exists()
