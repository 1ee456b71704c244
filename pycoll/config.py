"""Configuration, and the one place that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

from pycoll.errors import ArgumentError

VERSION = "0.1.0"
_T = TypeVar("_T")
TRANSPORTS = ("auto", "mpi")
SINGLE_COPY = ("auto", "off")
SYMMETRIC = ("off", "numpy")
STRICT = ("call", "next")
DEVICE_TRANSPORTS = ("auto", "cuda", "nccl")
DEVICE_MEMORY = ("auto", "ipc")
FOREVER_S = (
    1e9  # 30 years; what a timeout of infinity stands for, as kForever of csrc/engine/calls.cpp
)
_ADDRESSES = 1 << 47  # bytes that a process can address
_MOST_CELL = 1 << 30  # as in csrc/memory/control.cpp
_SHORTEST_SECRET = 16
_LOOPBACK = "127.0.0.1"
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Config:
    """How a communicator behaves; every field can be set by a variable of the environment.

    Attributes:
        timeout_s: Longest time a call waits for its peers, in seconds (``PYCOLL_TIMEOUT``). More
            than `FOREVER_S`, infinity too, is made that.
        cell_bytes: Staging memory of a rank for one iteration, a multiple of 4096
            (``PYCOLL_CELL_BYTES``, a number of bytes, or one with suffix K, M, G or T).
        heap_bytes: Capacity of a rank's part of the symmetric heap, a multiple of 4096
            (``PYCOLL_HEAP_BYTES``, likewise). It is address space; only arrays take memory.
        transport: ``auto``: shared memory on one host and MPI between hosts; ``mpi``: messages
            for everything (``PYCOLL_TRANSPORT``).
        tuning: Measured times that choose algorithms (``PYCOLL_TUNING``): ``auto`` for the file
            `tuning_path` if it is there, ``off``, or the path of a file. Rank 0's counts for all.
        single_copy: ``auto``: ranks of one host read large private arrays of each other through the
            kernel where that is faster than through shared memory; ``off``: they never do
            (``PYCOLL_SINGLE_COPY``).
        symmetric: ``numpy``: arrays of 16 KiB or more that NumPy makes are put into the symmetric
            heap, as far as it has room, and large calls work on them there; ``off``: only those
            that ask for it (``PYCOLL_SYMMETRIC``, where 1 is ``numpy`` and 0 is ``off``).
        strict: When a rank learns over messages that others have not made a call like its own:
            ``call``: in that call; ``next``: in a later one, if it needs nothing of others; see
            docs/mpi.md (``PYCOLL_STRICT``). Alike on all ranks.
        ddp_symmetric: Whether DDP's gradient buckets on CPUs are moved into the symmetric heap, see
            docs/torch.md (``PYCOLL_DDP_SYMMETRIC``, 0 or 1); alike on all ranks.
        device_transport: For arrays on CUDA devices: ``cuda`` (peer memory, one host), ``nccl``, or
            ``auto``: peer memory where ranks share a host (``PYCOLL_DEVICE_TRANSPORT``).
        device_heap_bytes: Capacity of a rank's part of the symmetric device heap, taken when the
            first array is made in it (``PYCOLL_DEVICE_HEAP_BYTES``).
        device_memory: How ranks of one host map it: ``auto``: by virtual memory where every device
            has it and every peer may open it, otherwise by CUDA IPC; ``ipc``: always so
            (``PYCOLL_DEVICE_MEMORY``).
        device_copy_bytes: From which size on all_gather and broadcast of arrays in the device heap
            are made by copy engines instead of kernels, in bytes of the whole result
            (``PYCOLL_DEVICE_COPY_BYTES``); 0 is never.
        cuda_multicast: Sums of device arrays with ``order="any"`` are made by the switch between
            devices where they have multicast (``PYCOLL_CUDA_MULTICAST``, 0 or 1). It has run on no
            device yet, and promises no bits.
        trace_dir: Folder to which every call is written (``PYCOLL_TRACE``); empty is none.
        dump_dir: Folder to which an error is written, with what led to it (``PYCOLL_DUMP``).
        nvtx: Calls are ranges of NVTX, too, which profilers such as Nsight Systems show
            (``PYCOLL_NVTX``, 0 or 1). It needs the device library, and no device.
        metrics_port: Port for Prometheus: that of rank 0, the next one for rank 1, and so on
            (``PYCOLL_METRICS_PORT``); 0 is none.
        metrics_address: The address at which it is (``PYCOLL_METRICS_ADDRESS``), by default one
            that only this host reaches. Whoever reaches it can read the counters.
    """

    timeout_s: float = 300.0
    cell_bytes: int = 512 << 10
    heap_bytes: int = 16 << 30
    transport: str = "auto"
    tuning: str = field(default="auto", repr=False)
    single_copy: str = "auto"
    symmetric: str = "off"
    strict: str = "call"
    ddp_symmetric: bool = field(default=True, repr=False)
    device_transport: str = "auto"
    device_heap_bytes: int = 1 << 30
    device_memory: str = field(default="auto", repr=False)
    device_copy_bytes: int = field(default=0, repr=False)
    cuda_multicast: bool = field(default=False, repr=False)
    trace_dir: str = field(default="", repr=False)
    dump_dir: str = field(default="", repr=False)
    nvtx: bool = field(default=False, repr=False)
    metrics_port: int = field(default=0, repr=False)
    metrics_address: str = field(default=_LOOPBACK, repr=False)

    def __post_init__(self) -> None:
        """Refuse values that no communicator can work with."""
        object.__setattr__(self, "timeout_s", check_timeout(self.timeout_s))
        for name in ("cell_bytes", "heap_bytes", "device_heap_bytes"):
            nbytes = getattr(self, name)
            whole = isinstance(nbytes, Integral) and not isinstance(nbytes, bool)
            most = _MOST_CELL if name == "cell_bytes" else _ADDRESSES
            if not whole or not 0 < nbytes <= most or nbytes % 4096:
                raise ArgumentError(
                    f"{name} is {nbytes!r}, expected a number of bytes: a multiple of 4096 from "
                    f"4096 to {most}"
                )
        if not isinstance(self.tuning, str) or not self.tuning:
            raise ArgumentError(
                f"tuning is {self.tuning!r}; accepted: auto, off, or the path of a table"
            )
        port = self.metrics_port
        if not isinstance(port, Integral) or isinstance(port, bool) or not 0 <= port < 1 << 16:
            raise ArgumentError(f"metrics_port is {port!r}, expected 0 to 65535")
        if self.metrics_address != _LOOPBACK:
            _check_address(self.metrics_address)
        choices = {
            "transport": TRANSPORTS,
            "single_copy": SINGLE_COPY,
            "symmetric": SYMMETRIC,
            "strict": STRICT,
            "device_transport": DEVICE_TRANSPORTS,
            "device_memory": DEVICE_MEMORY,
        }
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}"
                )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Return the defaults, changed by what the environment says.

        Args:
            environ: The variables; those of this process when None.

        Raises:
            ArgumentError: A variable has a value that cannot be used, or its name is misspelt.
        """
        environ = environment() if environ is None else environ
        _check_names(environ)
        found: dict[str, Any] = {}
        for name, variable, parse in _VARIABLES:
            value = _read(environ, variable, parse, getattr(cls, name))
            try:
                cls(**{name: value})
            except ArgumentError as error:
                raise ArgumentError(
                    f"{variable}={environ.get(variable)!r} in the environment: {error}"
                ) from None
            found[name] = value
        return cls(**found)


@dataclass(frozen=True)
class Launch:
    """The place of this process in its job.

    Attributes:
        rank: Number of this process, in [0, world_size) (``PYCOLL_RANK``).
        world_size: Number of processes of the job (``PYCOLL_WORLD_SIZE``).
        control_fd: Descriptor of the memfd for control block, flags and staging buffers
            (``PYCOLL_CONTROL_FD``).
        heap_fd: Descriptor of the memfd for the symmetric heap (``PYCOLL_HEAP_FD``).
    """

    rank: int
    world_size: int
    control_fd: int
    heap_fd: int

    def __post_init__(self) -> None:
        """Refuse a rank outside the job."""
        if not 0 <= self.rank < self.world_size:
            raise ArgumentError(
                f"rank is {self.rank}, expected 0 <= rank < world_size = {self.world_size}"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Launch | None:
        """Return what the launcher has written to the environment, or None if it has not.

        Raises:
            ArgumentError: Some of the variables are missing or malformed.
        """
        present = [name for name in LAUNCH_VARIABLES if name in environ]
        if not present:
            return None
        missing = [name for name in LAUNCH_VARIABLES if name not in environ]
        if missing:
            raise ArgumentError(
                f"{', '.join(present)} is set but {', '.join(missing)} is not: start ranks with "
                "`pycoll run -n N script.py`, which sets all of them"
            )
        return cls(*(_read(environ, name, int, -1) for name in LAUNCH_VARIABLES))

    def to_env(self) -> dict[str, str]:
        """Return the variables from which `from_env` reads this value back."""
        values = (self.rank, self.world_size, self.control_fd, self.heap_fd)
        return dict(zip(LAUNCH_VARIABLES, map(str, values), strict=True))


SECRET_VARIABLE = "PYCOLL_SECRET"
LAUNCH_VARIABLES = ("PYCOLL_RANK", "PYCOLL_WORLD_SIZE", "PYCOLL_CONTROL_FD", "PYCOLL_HEAP_FD")
MEETING_VARIABLE = "PYCOLL_MEETING_FD"  # in their place where ranks may be added


def check_timeout(timeout: Any, *, zero: bool = False) -> float:
    """Return the seconds that a call, or a wait, may take; infinity stands for `FOREVER_S`.

    Args:
        timeout: A number; a bool is none, nor a text, even if it spells one.
        zero: Whether 0 is one, too: not to wait at all.

    Raises:
        ArgumentError: If it is no such number.
    """
    try:
        wrong = isinstance(timeout, str | bytes | bytearray | bool)
        seconds = float("nan" if wrong else timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if not (seconds >= 0 if zero else seconds > 0):
        least = ", 0 or more" if zero else " above 0"
        raise ArgumentError(f"timeout={timeout!r}; accepted is a number of seconds{least}")
    return min(seconds, FOREVER_S)


def environment() -> MutableMapping[str, str]:
    """Return the environment of this process; no other module reads it by itself."""
    return os.environ


def job_secret(environ: Mapping[str, str] | None = None) -> str:
    """Return what only the ranks of this job know (``PYCOLL_SECRET``); "" if there is nothing.

    It is no field of `Config`, which programs may print.

    Raises:
        ArgumentError: It is so short that it could be guessed.
    """
    secret = (environment() if environ is None else environ).get(SECRET_VARIABLE, "")
    if 0 < len(secret) < _SHORTEST_SECRET:
        raise ArgumentError(
            f"{SECRET_VARIABLE} in the environment has {len(secret)} characters, expected at least "
            f"{_SHORTEST_SECRET}, drawn at random: openssl rand -hex 32"
        )
    return secret


def tuning_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the measured times of this user lie: in pycoll's part of the configuration."""
    environ = environment() if environ is None else environ
    base = environ.get("XDG_CONFIG_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path(environ.get("HOME", "/")) / ".config"
    return home / "pycoll" / "tuning.json"


def parse_bytes(text: str) -> int:
    """Return a number of bytes written as ``4096``, ``64K``, ``1M``, ``16G`` or ``2T`` (binary).

    Raises:
        ArgumentError: The text is none of these.
    """
    match = re.fullmatch(r"\s*(\d+)(?:([KMGT])(?:I?B)?|B)?\s*", text.upper(), re.ASCII)
    if match is None:
        raise ArgumentError(f"{text!r} is not a number of bytes, expected for example 4096 or 64K")
    digits, suffix = match.groups(default="")
    return int(digits) << _SHIFTS[suffix]


def _check_address(text: Any) -> None:
    import ipaddress  # seldom needed

    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ArgumentError(
            f"metrics_address is {text!r}, expected an address such as 127.0.0.1, or 0.0.0.0 for "
            "all networks of this host"
        ) from None


def _parse_switch(text: str) -> bool:
    return bool(("0", "1").index(text))


def _parse_symmetric(text: str) -> str:
    return {"0": "off", "1": "numpy"}.get(text, text)


# Field of `Config`, variable that sets it, and how its text is read.
_VARIABLES: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("timeout_s", "PYCOLL_TIMEOUT", float),
    ("cell_bytes", "PYCOLL_CELL_BYTES", parse_bytes),
    ("heap_bytes", "PYCOLL_HEAP_BYTES", parse_bytes),
    ("transport", "PYCOLL_TRANSPORT", str),
    ("tuning", "PYCOLL_TUNING", str),
    ("single_copy", "PYCOLL_SINGLE_COPY", str),
    ("symmetric", "PYCOLL_SYMMETRIC", _parse_symmetric),
    ("strict", "PYCOLL_STRICT", str),
    ("ddp_symmetric", "PYCOLL_DDP_SYMMETRIC", _parse_switch),
    ("device_transport", "PYCOLL_DEVICE_TRANSPORT", str),
    ("device_heap_bytes", "PYCOLL_DEVICE_HEAP_BYTES", parse_bytes),
    ("device_memory", "PYCOLL_DEVICE_MEMORY", str),
    ("device_copy_bytes", "PYCOLL_DEVICE_COPY_BYTES", parse_bytes),
    ("cuda_multicast", "PYCOLL_CUDA_MULTICAST", _parse_switch),
    ("trace_dir", "PYCOLL_TRACE", str),
    ("dump_dir", "PYCOLL_DUMP", str),
    ("nvtx", "PYCOLL_NVTX", _parse_switch),
    ("metrics_port", "PYCOLL_METRICS_PORT", int),
    ("metrics_address", "PYCOLL_METRICS_ADDRESS", str),
)


def _check_names(environ: Mapping[str, str]) -> None:
    """Refuse names that are nearly those of settings; others may be somebody else's."""
    settings = [*(variable for _, variable, _ in _VARIABLES), SECRET_VARIABLE]
    settings += [*LAUNCH_VARIABLES, MEETING_VARIABLE]
    for name in environ:
        if name.startswith("PYCOLL_") and name not in settings:
            import difflib  # takes long, and seldom is a name unknown

            if close := difflib.get_close_matches(name, settings, n=1, cutoff=0.9):
                raise ArgumentError(
                    f"{name} in the environment is no setting; did you mean {close[0]}?"
                )


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], _T], default: _T) -> _T:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:  # ArgumentError is one
        kinds: dict[Any, str] = {float: "a number", int: "an integer", _parse_switch: "0 or 1"}
        kind = kinds.get(parse, "a number of bytes such as 64K")
        raise ArgumentError(f"{name}={text!r} in the environment, expected {kind}") from error
