"""Finding out which rank this process is, and the memory that it shares with its peers.

The memory has no names: the launcher makes two memfds and every rank inherits their descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pycoll.config import LAUNCH_VARIABLES, MEETING_VARIABLE, Launch, environment
from pycoll.errors import ArgumentError, TransportError

_JOINED = "PYCOLL_JOINED"  # "<pid> of N ranks" of the process that took its place in the job
_PLACE = "PYCOLL_JOINED_PLACE"  # "<pid> <place>" of one that took a `Place`
_NO_RANK = "it is not the process that `pycoll run` started; only ranks themselves can join the job"
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_FIRST_PORT, _PORTS = 20_000, 10_000  # of jobs under Slurm


def discover(environ: MutableMapping[str, str] | None = None) -> Launch:
    """Take this process's place in its job.

    Under ``pycoll run`` the variables of the launcher are removed from `environ`, so that the
    processes which this rank starts do not take themselves for ranks. Without a launcher the
    process is a job of its own, with fresh memory.

    Returns:
        Rank, world size and two descriptors, which now belong to the caller.

    Raises:
        ArgumentError: The variables of the launcher are incomplete or malformed.
        TransportError: The inherited memory is not there, the place is already taken, or the
            environment says only a part of where ranks meet.
    """
    environ = environment() if environ is None else environ
    launch = Launch.from_env(environ)
    if launch is None:
        _refuse_second_join(environ)
        _refuse_incomplete(environ)
        return Launch(0, 1, make_memfd("control"), make_memfd("heap"))
    for name, fd in zip(LAUNCH_VARIABLES[2:], (launch.control_fd, launch.heap_fd), strict=True):
        _check_inherited(name, fd)
        os.set_inheritable(fd, False)
    for name in LAUNCH_VARIABLES:
        del environ[name]
    mark_joined(environ, f" of {launch.world_size} ranks")
    return launch


def mark_joined(environ: MutableMapping[str, str], ranks: str = "") -> None:
    """Remember that this process has taken its place in its job, `ranks` in words."""
    environ[_JOINED] = f"{os.getpid()}{ranks}"


def launched_by_us(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether ``pycoll run`` has started this process."""
    environ = environment() if environ is None else environ
    return any(name in environ for name in (*LAUNCH_VARIABLES, MEETING_VARIABLE))


def make_memfd(name: str) -> int:
    """Return a descriptor of fresh anonymous memory of size 0 that can be sealed.

    Raises:
        TransportError: The system has no memfd, or no descriptors are left.
    """
    if not hasattr(os, "memfd_create"):
        raise TransportError("this system has no memfd_create; pycoll runs on Linux")
    try:
        fd = os.memfd_create(f"pycoll-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TransportError(f"cannot make shared memory {name!r}: {error.strerror}") from error
    os.fchmod(fd, 0o600)
    return fd


def adopt(pid: int, fd: int) -> int:
    """Open memory made by a peer and return a descriptor of it in this process.

    Raises:
        TransportError: The process or its descriptor is gone, may not be opened, is not memory of
            pycoll, or is that of another user.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"cannot open the shared memory of process {pid} ({path}): {error.strerror}; it must "
            "be alive, on this host, in this pid namespace, and belong to the same user"
        ) from error
    try:
        _check_memfd(path, own)
        _check_owner(path, own)
    except TransportError:
        os.close(own)
        raise
    return own


def _check_inherited(variable: str, fd: int) -> None:
    try:
        os.fstat(fd)
    except (OSError, OverflowError) as error:
        raise TransportError(
            f"{variable}={fd}, but this process has no such descriptor: {_NO_RANK}"
        ) from error
    _check_memfd(f"{variable}={fd}", fd, f": {_NO_RANK}")


def _check_memfd(origin: str, fd: int, why: str = "") -> None:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        if _can_be_sealed(fd):  # without the right to look: who opens it will tell, and be heard
            return
        raise TransportError(f"{origin} cannot be looked at; /proc is needed: {error}") from error
    if not target.startswith("/memfd:pycoll-"):
        raise TransportError(f"{origin} is {target!r}, expected memory made by pycoll{why}")


def _check_owner(origin: str, fd: int) -> None:
    owner, user = os.fstat(fd).st_uid, os.geteuid()
    if owner != user:  # root may open everybody's
        raise TransportError(
            f"{origin} belongs to user {owner}, and this process runs as user {user}: ranks that "
            "share memory must be of the same user"
        )


def _can_be_sealed(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) >= 0
    return False


def _refuse_second_join(environ: Mapping[str, str]) -> None:
    pid, blank, ranks = environ.get(_JOINED, "").partition(" ")
    if pid == str(os.getpid()):
        raise TransportError(
            f"this process has already joined its job{blank}{ranks}, and closed that "
            "communicator, or been refused: it can try once; keep the communicator open, and call "
            "init again meanwhile, or make more of it with dup() or split()"
        )


def _refuse_incomplete(environ: Mapping[str, str]) -> None:
    size = environ.get("WORLD_SIZE", "")
    if "RANK" in environ and size.isascii() and size.isdigit() and int(size) > 1:
        raise TransportError(
            f"this process is rank {environ['RANK']} of {size} by the environment (RANK, "
            "WORLD_SIZE), which does not say where they meet: set MASTER_ADDR and MASTER_PORT, as "
            "torchrun does, or start ranks with `pycoll run -n N script.py` or mpiexec"
        )


@dataclass(frozen=True)
class Place:
    """A rank's place in a job, and where all ranks meet.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        host: That of rank 0.
        port: On which rank 0 serves the store.
    """

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Place | None:
        """Return what torchrun, `pycoll run --hosts` or Slurm have written; None if none has.

        The store is one port above MASTER_PORT, where PyTorch has its own.

        Raises:
            ArgumentError: If a variable is malformed.
        """
        if all(name in environ for name in _TORCH):
            rank, size, port = (_number(environ, _TORCH[i]) for i in (0, 1, 3))
            found = cls(rank, size, environ["MASTER_ADDR"], port + 1)
        elif all(name in environ for name in _SLURM):
            rank, size, job = (_number(environ, _SLURM[i]) for i in (0, 1, 3))
            step = environ.get("SLURM_STEP_ID", "0")
            offset = (17 * job + (int(step) if step.isdigit() else 0)) % _PORTS
            found = cls(rank, size, _first_host(environ[_SLURM[2]]), _FIRST_PORT + offset)
        else:
            return None
        if not 0 <= found.rank < found.size or not 0 < found.port < 1 << 16:
            raise ArgumentError(f"the environment says {found}, which cannot be")
        return found if found.size > 1 else None

    def take(self, environ: MutableMapping[str, str]) -> None:
        """Note in the environment that this process has the place, for those that it starts.

        The variables of the launcher stay, as PyTorch may need them: so a process that this one
        starts finds them, too.

        Raises:
            TransportError: The process that has started this one, or an earlier one, has it.
        """
        pid, _, place = environ.get(_PLACE, "").partition(" ")
        own = f"{self.rank} {self.size} {self.host} {self.port}"
        if place == own and pid != str(os.getpid()):
            raise TransportError(
                f"process {pid} has joined its job as rank {self.rank} of {self.size} and has "
                f"started this process ({os.getpid()}), which inherits its variables and is no "
                "rank: start it without them, such as `env -u RANK -u SLURM_PROCID python "
                f"tool.py`, and it is a world of one. If it is to be rank {self.rank} after "
                f"process {pid} has left, start it without {_PLACE}"
            )
        environ[_PLACE] = f"{os.getpid()} {own}"


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(f"{name}={text!r} in the environment, expected a number")
    return int(text)


def _first_host(nodes: str) -> str:
    """Return the first of a list of nodes as Slurm writes it: ``a3``, ``node[07-09,12],b1``."""
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])
