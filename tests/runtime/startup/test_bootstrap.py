import fcntl
import os
import signal
import subprocess
import sys

import pytest

from pycoll.config import (
    FOREVER_S,
    LAUNCH_VARIABLES,
    Config,
    Launch,
    check_timeout,
    job_secret,
    parse_bytes,
)
from pycoll.errors import ArgumentError, TransportError
from pycoll.runtime.startup.bootstrap import Place, adopt, discover, make_memfd
from pycoll.testing import run_threads


@pytest.fixture
def fds():
    """Descriptors to close at the end of the test, whatever it does."""
    opened = []
    yield opened
    for fd in opened:
        os.close(fd)


@pytest.fixture
def launched(fds):
    """The environment of rank 1 of 3."""
    fds += [make_memfd("control"), make_memfd("heap")]
    return Launch(1, 3, fds[0], fds[1]).to_env()


def test_alone_is_a_job_of_one(fds):
    launch = discover({})
    fds += [launch.control_fd, launch.heap_fd]
    assert (launch.rank, launch.world_size) == (0, 1)
    assert os.fstat(launch.heap_fd).st_size == 0
    assert not os.path.samestat(os.fstat(launch.control_fd), os.fstat(launch.heap_fd))


def test_a_rank_takes_its_place_once(launched, fds):
    os.set_inheritable(fds[0], True)
    environ = {**launched, "OTHER": "1", "WORLD_SIZE": "2", "RANK": "0"}
    assert discover(environ) == Launch(1, 3, *fds)
    assert not set(LAUNCH_VARIABLES) & set(environ)
    assert environ["OTHER"] == "1"
    assert not os.get_inheritable(fds[0])
    with pytest.raises(TransportError, match="already joined its job of 3 ranks"):
        discover(environ)


def test_a_child_of_a_rank_is_alone(launched, fds):
    discover(launched)
    script = "from pycoll.runtime.startup.bootstrap import discover; print(discover().world_size)"
    child = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **launched},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout == "1\n"


@pytest.mark.parametrize("missing", LAUNCH_VARIABLES)
def test_an_incomplete_launch_is_refused(launched, missing):
    del launched[missing]
    with pytest.raises(ArgumentError, match=f"{missing} is not"):
        discover(launched)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("PYCOLL_RANK", "one", "PYCOLL_RANK='one'"),
        ("PYCOLL_RANK", "3", "rank is 3, expected 0 <= rank < world_size = 3"),
        ("PYCOLL_RANK", "-1", "rank is -1"),
        ("PYCOLL_WORLD_SIZE", "0", "world_size = 0"),
    ],
)
def test_a_malformed_launch_is_refused(launched, name, value, match):
    with pytest.raises(ArgumentError, match=match):
        discover({**launched, name: value})


@pytest.mark.parametrize("fd", [-1, 1 << 20, 1 << 40])
def test_memory_that_was_not_inherited_is_refused(launched, fd):
    with pytest.raises(TransportError, match="no such descriptor"):
        discover({**launched, "PYCOLL_HEAP_FD": str(fd)})


def test_memory_of_others_is_refused(launched, fds):
    fds.append(os.memfd_create("theirs"))
    with pytest.raises(TransportError, match="made by pycoll: it is not the process that"):
        discover({**launched, "PYCOLL_CONTROL_FD": str(fds[-1])})


def test_ranks_that_cannot_meet_are_refused():
    with pytest.raises(TransportError, match=r"MASTER_ADDR and MASTER_PORT(?s:.*)pycoll run -n N"):
        discover({"WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "many", "RANK": "0"},
    ],
)
def test_one_process_is_no_job_of_torchrun(environ, fds):
    launch = discover(environ)
    fds += [launch.control_fd, launch.heap_fd]
    assert launch.world_size == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user's name")
def test_memory_of_another_user_is_refused():
    """Root may open it: what he adopts would be written by somebody else."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        os.write(write_end, b"%d" % make_memfd("control"))
        signal.pause()
    try:
        fd = int(os.read(read_end, 20))
        with pytest.raises(TransportError, match="belongs to user 65534, and this process runs as"):
            adopt(pid, fd)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)


def test_a_secret_that_can_be_guessed():
    assert job_secret({}) == ""
    assert job_secret({"PYCOLL_SECRET": "0123456789abcdef"}) == "0123456789abcdef"
    with pytest.raises(ArgumentError, match="has 15 characters, expected at least 16"):
        job_secret({"PYCOLL_SECRET": "0123456789abcde"})
    with pytest.raises(ArgumentError, match="did you mean PYCOLL_SECRET"):
        Config.from_env({"PYCOLL_SECERT": "0123456789abcdef"})


def test_memfd_is_private_and_can_be_sealed(fds):
    fds.append(make_memfd("thing"))
    assert os.readlink(f"/proc/self/fd/{fds[0]}").startswith("/memfd:pycoll-thing")
    assert os.fstat(fds[0]).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fds[0])
    fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    assert fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW


def test_adopt_opens_the_same_memory(fds):
    script = (
        "import os; from pycoll.runtime.startup.bootstrap import make_memfd\n"
        "fd = make_memfd('peer'); os.write(fd, b'hello'); print(fd, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        fd = int(peer.stdout.readline())
        fds.append(adopt(peer.pid, fd))
        assert os.pread(fds[0], 5, 0) == b"hello"
        assert not os.get_inheritable(fds[0])
        peer.communicate("\n")
    with pytest.raises(TransportError, match=f"process {peer.pid}"):
        adopt(peer.pid, fd)


def test_adopt_refuses_other_memory(fds):
    fds.append(os.memfd_create("theirs"))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="expected memory made by pycoll"):
        adopt(os.getpid(), fds[0])
    assert set(os.listdir("/proc/self/fd")) == before


def test_config_from_env():
    assert Config.from_env({}) == Config(300.0, 512 << 10, 16 << 30)
    environ = {
        "PYCOLL_TIMEOUT": "2.5",
        "PYCOLL_CELL_BYTES": "64K",
        "PYCOLL_HEAP_BYTES": "1G",
    }
    assert Config.from_env(environ) == Config(2.5, 65536, 1 << 30)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYCOLL_TIMEOUT", "soon"),
        ("PYCOLL_TIMEOUT", "0"),
        ("PYCOLL_TIMEOUT", "nan"),
        ("PYCOLL_TIMEOUT", "-inf"),
        ("PYCOLL_CELL_BYTES", "100"),
        ("PYCOLL_CELL_BYTES", "-4096"),
        ("PYCOLL_HEAP_BYTES", "0"),
        ("PYCOLL_HEAP_BYTES", "lots"),
        ("PYCOLL_HEAP_BYTES", "99999999T"),
        ("PYCOLL_DEVICE_HEAP_BYTES", "5"),
    ],
)
def test_a_malformed_variable_is_refused(name, value):
    with pytest.raises(
        ArgumentError, match=f"^{name}='{value}' in the environment.* (expected|accepted)"
    ):
        Config.from_env({name: value})


@pytest.mark.parametrize("name", ["PYCOLL_TIMEOT", "PYCOLL_TIMEOUT_S", "PYCOLL_TIMOUT"])
def test_misspelt_settings(name):
    with pytest.raises(ArgumentError, match=rf"^{name} .* did you mean PYCOLL_TIMEOUT\?$"):
        Config.from_env({name: "3"})


def test_settings_of_others():
    names = ["PYCOLL_RANK", "PYCOLL_JOINED", "PYCOLL_SOCKET_IFNAME", "PYCOLL_CUDA", "PYCOLL_MINE"]
    assert Config.from_env(dict.fromkeys(names, "3")) == Config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", "abc"),
        ("timeout_s", "5"),
        ("timeout_s", None),
        ("timeout_s", 1j),
        ("heap_bytes", 1 << 64),
        ("heap_bytes", "1G"),
        ("heap_bytes", 4096.0),
        ("heap_bytes", True),
        ("cell_bytes", 1 << 63),
        ("cell_bytes", 1 << 31),
        ("device_heap_bytes", "1G"),
        ("tuning", 5),
        ("transport", 5),
        ("transport", ["auto"]),
    ],
)
def test_a_setting_of_no_use_is_refused(name, value):
    with pytest.raises(
        ArgumentError, match=rf"{name.removesuffix('_s')}( is |=).*(expected|accepted)"
    ):
        Config(**{name: value})


@pytest.mark.parametrize("value", [float("inf"), 1e300])
def test_no_end_of_time(value):
    assert Config(timeout_s=value).timeout_s == check_timeout(value) == FOREVER_S
    assert Config.from_env({"PYCOLL_TIMEOUT": str(value)}) == Config(timeout_s=value)


def test_ranks_that_wait_for_ever_make_calls():
    config = Config(timeout_s=float("inf"), heap_bytes=1 << 20)
    run_threads(2, lambda comm: comm.barrier(), config=config)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("8", 8), ("8B", 8), ("64k", 1 << 16), ("1MiB", 1 << 20), ("2GB", 2 << 30)],
)
def test_parse_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-1", "1Q", "1KK", "0x10"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ArgumentError, match="number of bytes"):
        parse_bytes(text)


HELD = """
import fcntl, signal, sys
from pycoll.config import Config
from pycoll.runtime.startup.bootstrap import make_memfd
from pycoll.runtime.startup.make_groups import open_control
fd = make_memfd("control")
fcntl.lockf(fd, fcntl.LOCK_EX)  # as a rank has it that is stopped while it lays out the memory
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
try:
    open_control(fd, 2, Config(timeout_s=float(sys.argv[1])))
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (("0.2", "0"), "CollTimeout start-up: another rank has not finished laying out the "),
        (("30", "0.3"), "KeyboardInterrupt"),
    ],
)
def test_memory_that_nobody_finishes_to_lay_out(limits, said):
    done = subprocess.run(
        [sys.executable, "-c", HELD, *limits], capture_output=True, text=True, timeout=20
    )
    assert done.stdout.startswith(said), done


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (TORCHRUN, Place(1, 4, "a", 29501)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, None),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[07-09,12],b1"}, Place(3, 8, "n07", 20119)),
        ({**SLURM, "SLURM_STEP_NODELIST": "a3,b", "SLURM_STEP_ID": "2"}, Place(3, 8, "a3", 20121)),
    ],
)
def test_launchers_are_recognised(environ, found):
    assert Place.from_env(environ) == found


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "many"), ("MASTER_PORT", "x")]
)
def test_places_that_cannot_be(name, value):
    with pytest.raises(ArgumentError, match=value):
        Place.from_env({**TORCHRUN, name: value})
