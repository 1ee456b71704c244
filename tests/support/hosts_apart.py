"""Hosts of a test: network namespaces on one switch, between which packets can be lost. Needs root.

Nothing has a name outside: all of it goes when the processes that hold it do.
"""

import contextlib
import ctypes
import os
import signal
import subprocess

_NEWNET = 0x40000000  # CLONE_NEWNET
_PDEATHSIG = 1
_NOBODY = "02:00:00:00:00:ff"  # an address of Ethernet that nobody has
_libc = ctypes.CDLL(None, use_errno=True)


def missing():
    """Return why there can be no such hosts here; "" if there can be."""
    if os.getuid() != 0:
        return "network namespaces need root"
    try:
        with contextlib.closing(Hosts(2)):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', b'') or error}"


def _hold():
    """Start a process with a network of its own; return its number."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        _libc.prctl(_PDEATHSIG, int(signal.SIGKILL))
        os.write(tell, bytes([_libc.unshare(_NEWNET) & 1]))
        while True:
            signal.pause()
    answer = os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    if answer != b"\0":
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise OSError("unshare is refused")
    return pid


class Hosts:
    """Some hosts with the addresses 10.9.0.1, 10.9.0.2, and so on."""

    def __init__(self, n):
        self.n, self._held = n, []
        try:
            self._switch = self._add()
            self._at(self._switch, "ip link add br0 type bridge")
            self._at(self._switch, "ip link set br0 up")
            self._hosts = [self._add() for _ in range(n)]
            for k, pid in enumerate(self._hosts):
                self._at(self._switch, f"ip link add v{k} type veth peer name eth0 netns {pid}")
                self._at(self._switch, f"ip link set v{k} master br0 up")
                self._at(pid, f"ip addr add {self.address(k)}/24 dev eth0")
                self._at(pid, "ip link set eth0 up")
                self._at(pid, "ip link set lo up")
        except BaseException:
            self.close()
            raise

    def _add(self):
        self._held.append(_hold())
        return self._held[-1]

    @staticmethod
    def _at(pid, command):
        line = ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()]
        subprocess.run(line, check=True, capture_output=True)

    @staticmethod
    def address(k):
        return f"10.9.0.{k + 1}"

    def enter(self, k):
        """Move this process, before it has other threads, to a host."""
        fd = os.open(f"/proc/{self._hosts[k]}/ns/net", os.O_RDONLY)
        if _libc.setns(fd, _NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)

    def lose(self, src, dst):
        """Lose all packets from one host to another; those the other way arrive."""
        self._neighbour("replace", src, dst, f"lladdr {_NOBODY} nud permanent")

    def find(self, src, dst):
        """End that."""
        self._neighbour("del", src, dst)

    def _neighbour(self, verb, src, dst, more=""):
        self._at(self._hosts[src], f"ip neigh {verb} {self.address(dst)} dev eth0 {more}")

    def cut(self, k):
        """Pull the plug of a host."""
        self._at(self._switch, f"ip link set v{k} down")

    def join(self, k):
        """Put it in again."""
        self._at(self._switch, f"ip link set v{k} up")

    def slow(self, k, mbit):
        """Limit what goes to a host."""
        rate = f"tbf rate {mbit}mbit burst 32kb latency 50ms"
        self._at(self._switch, f"tc qdisc replace dev v{k} root {rate}")

    def fast(self, k):
        """End that."""
        self._at(self._switch, f"tc qdisc del dev v{k} root")

    def close(self):
        for pid in self._held:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._held = []
