"""``pycoll run --hosts`` by OpenSSH: two servers on loopback, each with its own port and keys."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launched import launched, outcome

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
APART = ["unshare", "--ipc"] if os.geteuid() == 0 else []
SERVER = """
ListenAddress {host}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
CLIENT = """
Port {port}
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking accept-new
IdentitiesOnly yes
BatchMode yes
"""
HOSTS = ("localhost", "127.0.0.2")

pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="it needs OpenSSH, ssh and sshd"
)


def make_key(path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def wait_for(rsh, host, server):
    """Wait until a host lets this user in; skip the test if it never does."""
    for _ in range(100):
        done = subprocess.run([*rsh, host, "true"], capture_output=True, text=True, check=False)
        if done.returncode == 0 or server.poll() is not None:
            break
        time.sleep(0.1)
    if done.returncode != 0:
        pytest.skip(f"sshd lets nobody in: {server.poll()}, {done.stderr.strip()}")


@pytest.fixture(scope="module")
def rsh(tmp_path_factory):
    """Start both servers; return the remote shell that reaches them. As root, they are apart."""
    folder = tmp_path_factory.mktemp("ssh")
    port = 20_000 + os.getpid() % 10_000
    make_key(folder / "key")
    make_key(folder / "host_key")
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder))
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where sshd keeps its unprivileged part
    command, servers = ["ssh", "-F", str(folder / "client")], []
    try:
        for number, host in enumerate(HOSTS):
            file = folder / f"server{number}"
            file.write_text(SERVER.format(host=host, port=port, folder=folder))
            words = [*(APART if number else []), SSHD, "-D", "-f", str(file)]
            servers.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            wait_for(command, host, servers[-1])
        yield command
    finally:
        for server in servers:
            server.terminate()
            server.wait(10)


@pytest.fixture
def job(rsh, tmp_path):
    """``job(text)`` starts four ranks, two on each host."""
    command = [sys.executable, "-m", "pycoll", "run", "-n", "4", "--hosts", ",".join(HOSTS)]
    with launched(cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}) as start:

        def begin(text):
            (tmp_path / "script.py").write_text(text)
            return start([*command, "--rsh", shlex.join(rsh), "script.py", "a b", "$HOME"])

        yield begin


def is_running(pid):
    """Tell whether a process is there, and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until_gone(pids):
    until = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < until
        time.sleep(0.05)


SUM = """
import os, sys
import numpy as np, pycoll
with pycoll.init(timeout=20) as comm:
    total = comm.all_reduce(np.full(100_000, 1.0 + comm.rank))
    print(comm.rank, total[0], total[-1], "TCP" in comm.transport, sys.argv[1:], os.getcwd())
"""


def test_ranks_of_two_hosts(job, tmp_path):
    status, out, err = outcome(job(SUM))
    assert status == 0, err
    ends = f"10.0 10.0 {bool(APART)} ['a b', '$HOME'] {tmp_path}"
    assert sorted(out.splitlines()) == [f"{rank} {ends}" for rank in range(4)]


def test_an_error_on_another_host_ends_the_job(job):
    text = """
import pycoll
comm = pycoll.init(timeout=20)
if comm.rank == 3:
    raise ValueError("on the second host")
comm.barrier()
"""
    status, _, err = outcome(job(text))
    assert status == 1
    assert "ValueError: on the second host" in err
    assert "rank 3 exited with code 1" in err


SLEEP = """
import os, time
print(os.getpid(), os.environ["RANK"], flush=True)
time.sleep(60)
"""


def pids_of(process):
    return [int(process.stdout.readline().split()[0]) for _ in range(4)]


def test_a_signal_ends_all_ranks(job):
    process = job(SLEEP)
    pids = pids_of(process)
    process.send_signal(signal.SIGTERM)
    assert outcome(process)[0] == 128 + signal.SIGTERM
    wait_until_gone(pids)


def test_no_rank_outlives_the_launcher(job):
    process = job(SLEEP)
    pids = pids_of(process)
    process.kill()
    process.wait()
    wait_until_gone(pids)


def test_a_lost_connection_ends_the_job(job):
    process = job(SLEEP)
    pids = pids_of(process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)  # ssh to the second host
    status, _, err = outcome(process)
    assert status == 128 + signal.SIGKILL, err
    wait_until_gone(pids)
