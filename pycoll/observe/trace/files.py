"""The files of a trace: two for each rank of each communicator.

``NAME.calls`` has 38 bytes for each call, as `PACKED` says. ``NAME.jsonl`` has a head in its first
line, in its second how many calls are lost, and then lines that name call sites, messages, how much
memory the rank used, what its system knew of its connections, how many samples it had in each step
and how long it waited, what its device did, and who held it up when it waited long.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError

FORMAT = 3
RECORD = np.dtype(
    [
        ("enter_ns", "<u8"),
        ("descriptor", "<u8"),
        ("count", "<u8"),
        ("total_ns", "<f4"),
        ("waited_ns", "<f4"),
        ("iteration", "<u4"),
        ("site", "<u2"),
        ("awaited", "<u2"),
    ]
)
PACKED = np.dtype(  # PackedRecord of csrc/engine/trace.cpp
    [
        ("enter_ns", "<u8"),
        ("descriptor", "<u8"),
        ("count_low", "<u4"),
        ("count_high", "<u2"),
        *((name, RECORD[name]) for name in RECORD.names[3:]),
    ]
)
FAILED, NOBODY = 0x8000, 0xFFFF


@dataclass
class Stream:
    """What one rank has written about one communicator.

    Attributes:
        head: Who wrote it, where and when.
        calls: A `RECORD` for each call.
        sites: Text of each call site.
        messages: Rows of way, enter_ns, total_ns, peer, tag, nbytes.
        memory: Rows of time in ns, bytes of the process, of symmetric memory, and in swap, pages
            that had to come from a disk so far, seconds without a core so far, and cores.
        held: Findings of `pycoll.observe.causes`, from when this rank had waited long.
        links: By peer, counters as `pycoll.observe.links` reads them, again and again.
        steps: Rows of time in ns, samples of this rank, and seconds that its program waited, or
            None, for each step.
        device: Rows of what a device did: name, when it began, on the host's clock, how long it
            took, bytes, stream, when it was launched, and the error of these times; all in ns.
        lost: Calls for which there was no room, in memory or on the disk.
    """

    head: dict[str, Any]
    calls: np.ndarray
    sites: dict[int, str] = field(default_factory=dict)
    messages: list[list[Any]] = field(default_factory=list)
    memory: list[list[int]] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[int, dict[str, int]]] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)
    device: list[list[Any]] = field(default_factory=list)
    lost: int = 0

    @property
    def rank(self) -> int:
        """Its rank in the job."""
        return self.head["rank"]


def unpack(packed: np.ndarray) -> np.ndarray:
    """Return records with one number for the count."""
    calls = np.empty(packed.size, RECORD)
    for name in set(RECORD.names) - {"count"}:
        calls[name] = packed[name]
    calls["count"] = packed["count_low"] | packed["count_high"].astype(np.uint64) << np.uint64(32)
    return calls


def clock_of_host() -> tuple[str, str]:
    """Return what tells which processes have the same monotonic clock: host, and clock."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    offsets = Path("/proc/self/timens_offsets")
    shift = offsets.read_text().split() if offsets.exists() else []
    return socket.gethostname(), " ".join([boot, *shift])


def read(folder: str | Path) -> list[Stream]:
    """Read the trace that lies in a folder.

    Raises:
        ArgumentError: If there is none, or one that cannot be read.
    """
    heads = sorted(Path(folder).glob("*.jsonl")) if Path(folder).is_dir() else []
    streams = [_stream(path) for path in heads]
    if not streams:
        raise ArgumentError(
            f"{str(folder)!r} holds no trace: make one with `pycoll run --trace DIR`, or with "
            "PYCOLL_TRACE=DIR in the environment of the ranks"
        )
    return streams


def _stream(path: Path) -> Stream:
    try:
        head, *lines = list(_lines(path.read_text().splitlines()))
        if head.get("pycoll_trace") != FORMAT:
            raise ValueError(f"its format is {head.get('pycoll_trace')!r}, expected {FORMAT}")
        raw = path.with_suffix(".calls").read_bytes()
        whole = len(raw) // PACKED.itemsize * PACKED.itemsize  # the writer may have been killed
        stream = Stream(head, unpack(np.frombuffer(raw[:whole], PACKED)))
        for line in lines:
            if "site" in line:
                stream.sites[int(line["site"])] = str(line["text"])
            elif "message" in line:
                stream.messages.append(line["message"])
            elif "memory" in line:
                stream.memory.append(line["memory"])
            elif "held" in line:
                stream.held.append(line["held"])
            elif "links" in line:
                stream.links.append({int(peer): one for peer, one in line["links"].items()})
            elif "step" in line:
                stream.steps.append(line["step"])
            elif "device" in line:
                stream.device.append(line["device"])
            elif "lost" in line:
                stream.lost = int(line["lost"])
        return stream
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{str(path)!r} is no part of a trace: {error}") from None


def _lines(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Yield the values of lines of JSON; the last may have been cut short."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not isinstance(value, dict):
            raise ValueError("a line is no object")
        yield value
