"""Networks as small descriptions: which links a message takes, and how fast each of them is.

A fabric joins n ranks by links of one direction. Messages that take one link at the same time share
it. Parallel cables that any message may take, such as the uplinks of a leaf switch, count as one
link of their total speed: routing is taken to spread messages evenly. Each is named by its class
and a number: ``out`` and ``in`` are the ports of a rank, other names are those of the class below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from pycoll.errors import ArgumentError


@dataclass(frozen=True)
class Fabric:
    """Ranks behind one switch that is never the bottleneck: a message takes two ports.

    Attributes:
        n: Number of ranks.
        bw: Bytes per second of a port, in each direction.
        latency: Seconds from one rank to another, for any size.
        hop: Seconds more for each switch beyond the first.
        gap: Seconds for each further message that a rank sends or receives in a round.
        fold: Bytes per second that a rank folds into others.
        speeds: What single links have in place of their full speed, as a fraction, by their names
            such as ``up[3]``; 0 is a link that is down.
    """

    n: int
    bw: float = 25e9
    latency: float = 2e-6
    hop: float = 3e-7
    gap: float = 3e-7
    fold: float = 50e9
    speeds: tuple[tuple[str, float], ...] = ()

    kind: ClassVar[str] = "switch"
    about: ClassVar[str] = "one switch that is never the bottleneck"

    def __post_init__(self) -> None:
        """Refuse numbers that no network has; ArgumentError."""
        if self.n < 1 or min(self.bw, self.fold) <= 0 or min(self.latency, self.hop, self.gap) < 0:
            raise ArgumentError(f"{self}: speeds are positive, times are not negative")

    @property
    def near(self) -> int:
        """Number of consecutive ranks that are close to each other; 1 if all are alike."""
        return 1

    def links(self) -> dict[str, np.ndarray]:
        """Return the bytes per second of each link, by class."""
        return {"out": np.full(self.n, self.bw), "in": np.full(self.n, self.bw)}

    def path(self, src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
        """Return the links that messages take, ``[messages]`` for each leg, or `none`."""
        return [src, self.n + dst]

    def delay(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray | float:
        """Return the seconds that messages take however small they are."""
        return self.latency

    @cached_property
    def first(self) -> dict[str, int]:
        """Number of the first link of each class."""
        sizes = [len(each) for each in self.links().values()]
        return dict(zip(self.links(), np.cumsum([0, *sizes]).tolist(), strict=False))

    @cached_property
    def none(self) -> int:
        """The number that stands for no link, behind all others."""
        return sum(len(each) for each in self.links().values())

    @cached_property
    def capacity(self) -> np.ndarray:
        """Bytes per second of all links, and of one that stands for none, behind them."""
        found = np.append(np.concatenate(list(self.links().values())), np.inf)
        for name, factor in self.speeds:
            found[self.number(name)] *= factor
        return found

    def number(self, name: str) -> int:
        """Return the number of a link, such as ``up[3]``.

        Raises:
            ArgumentError: If there is none of that name.
        """
        which, _, place = name.removesuffix("]").partition("[")
        size = len(self.links().get(which, ()))
        if not place.isdecimal() or int(place) >= size:
            known = ", ".join(f"{k}[0..{len(v) - 1}]" for k, v in self.links().items() if len(v))
            raise ArgumentError(f"{self.kind} has no link {name!r}; it has {known}")
        return self.first[which] + int(place)

    def name(self, number: int) -> str:
        """Return the name of a link."""
        which = max((k for k in self.first if self.first[k] <= number), key=self.first.get)
        return f"{which}[{number - self.first[which]}]"

    def load(
        self, into: np.ndarray, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray | float
    ) -> None:
        """Add the bytes of messages to those of the links that they take, ``[links + 1]``."""
        for leg in self.path(src, dst):
            first = int(leg.min())
            if isinstance(nbytes, float):  # all the same
                found = np.bincount(leg - first) * nbytes
            else:
                found = np.bincount(leg - first, nbytes)
            into[first : first + len(found)] += found

    def slowest(self, busy: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return the most seconds that any link on the way of each message is busy.

        Args:
            busy: ``[links + 1]`` seconds.
            src: ``[messages]`` ranks that send.
            dst: ``[messages]`` ranks that receive.
        """
        legs = self.path(src, dst)
        most = busy[legs[0]]
        for leg in legs[1:]:
            most = np.maximum(most, busy[leg])
        return most

    def leaving(self, busy: np.ndarray) -> np.ndarray:
        """Return ``[n]`` how long each rank's own port is busy sending."""
        return busy[: self.n]

    def busy(self, load: np.ndarray) -> np.ndarray:
        """Return the seconds that links need for bytes; infinite on one that is down."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = load / self.capacity
        return np.nan_to_num(found, copy=False, posinf=np.inf) if self.speeds else found


@dataclass(frozen=True)
class FatTree(Fabric):
    """Leaf switches under spines, and with ``pod`` under pods of leaves under a core.

    Attributes:
        leaf: Ranks of a leaf switch; link ``up[i]`` leaves leaf i, ``down[i]`` enters it.
        pod: Leaves of a pod, whose links are ``pod up`` and ``pod down``; 0: two levels only.
        over: Oversubscription: bandwidth below a switch over that above, at each level.
    """

    leaf: int = 32
    pod: int = 0
    over: float = 1.0

    kind: ClassVar[str] = "fat-tree"
    about: ClassVar[str] = "leaf switches under spines, with oversubscription"

    def __post_init__(self) -> None:
        """Refuse groups that cannot be; ArgumentError."""
        super().__post_init__()
        if self.leaf < 1 or self.pod < 0 or self.over <= 0:
            raise ArgumentError(f"{self}: leaf and over are positive, pod is not negative")

    @property
    def near(self) -> int:
        """The ranks of a leaf."""
        return self.leaf

    def links(self) -> dict[str, np.ndarray]:
        """Ports, and the uplinks and downlinks of each level."""
        found = super().links()
        below = self.leaf * self.bw
        levels = [("up", "down", self.leaf)]
        levels += [("pod up", "pod down", self.leaf * self.pod)] if self.pod else []
        for up, down, size in levels:
            speed = np.full(-(-self.n // size), below / self.over)
            found |= {up: speed, down: speed.copy()}
            below = self.pod * below / self.over
        return found

    def path(self, src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
        """Climb as far as needed."""
        legs, size = super().path(src, dst), self.leaf
        for up, down, times in (("up", "down", self.pod), ("pod up", "pod down", 1)):
            if up in self.first:
                a, b = src // size, dst // size
                legs += [np.where(a != b, self.first[up] + a, self.none)]
                legs += [np.where(a != b, self.first[down] + b, self.none)]
                size *= times
        return legs

    def delay(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Two switches more for each level."""
        far = src // self.leaf != dst // self.leaf
        times = far * 2.0
        if self.pod:
            size = self.leaf * self.pod
            times += 2.0 * (src // size != dst // size)
        return self.latency + self.hop * times


@dataclass(frozen=True)
class Dragonfly(Fabric):
    """Groups without contention inside, and a link between each two of them.

    Messages take the direct link between their groups (minimal routing).

    Attributes:
        group: Ranks of a group; link ``global[i]`` goes from group i // groups to i % groups.
        over: What the ranks of a group can send over what all its global links can.
    """

    group: int = 128
    over: float = 1.0

    kind: ClassVar[str] = "dragonfly"
    about: ClassVar[str] = "groups, and a link between each two of them"

    def __post_init__(self) -> None:
        """Refuse groups that cannot be; ArgumentError."""
        super().__post_init__()
        if self.group < 1 or self.over <= 0:
            raise ArgumentError(f"{self}: group and over are positive")

    @property
    def near(self) -> int:
        """The ranks of a group."""
        return self.group

    @property
    def groups(self) -> int:
        """Number of groups."""
        return -(-self.n // self.group)

    def links(self) -> dict[str, np.ndarray]:
        """Ports, and the links between groups."""
        speed = self.group * self.bw / self.over / max(1, self.groups - 1)
        return {**super().links(), "global": np.full(self.groups**2, speed)}

    def path(self, src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
        """Ports, and one link between groups."""
        a, b = src // self.group, dst // self.group
        link = np.where(a != b, self.first["global"] + a * self.groups + b, self.none)
        return [*super().path(src, dst), link]

    def delay(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Two switches more between groups."""
        return self.latency + 2 * self.hop * (src // self.group != dst // self.group)


@dataclass(frozen=True)
class Rails(Fabric):
    """Nodes of GPUs joined by NVLink; GPU j of each node is on rail j, a network of its own.

    A message to another rail of another node goes through the spine.

    Attributes:
        gpus: GPUs of a node, consecutive ranks; ports ``near out`` and ``near in`` are NVLink's.
        near_bw: Bytes per second of NVLink, for each GPU in each direction.
        near_latency: Seconds from one GPU to another of its node.
        nodes: Nodes under one switch of a rail: the switch of rail j and block b of nodes has the
            spine links ``up[b * gpus + j]`` and ``down[b * gpus + j]``.
        over: Oversubscription of the spine.
    """

    bw: float = 50e9
    latency: float = 4e-6
    gpus: int = 8
    near_bw: float = 450e9
    near_latency: float = 1e-6
    nodes: int = 32
    over: float = 1.0
    fold: float = 1e12

    kind: ClassVar[str] = "rails"
    about: ClassVar[str] = "nodes of GPUs with NVLink, a network for each GPU number"

    def __post_init__(self) -> None:
        """Refuse nodes that cannot be; ArgumentError."""
        super().__post_init__()
        if min(self.gpus, self.nodes) < 1 or min(self.over, self.near_bw) <= 0:
            raise ArgumentError(f"{self}: gpus, nodes, over and near_bw are positive")

    @property
    def near(self) -> int:
        """The GPUs of a node."""
        return self.gpus

    def links(self) -> dict[str, np.ndarray]:
        """Ports of both kinds, and the links of each rail's switches to the spine."""
        near = np.full(self.n, self.near_bw)
        blocks = -(-self.n // (self.gpus * self.nodes))
        spine = np.full(blocks * self.gpus, self.nodes * self.bw / self.over)
        found = {**super().links(), "near out": near, "near in": near.copy()}
        return {**found, "up": spine, "down": spine.copy()}

    def path(self, src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
        """NVLink inside a node; else the rails, and the spine between their switches."""
        inside = src // self.gpus == dst // self.gpus
        a, b = (r // (self.gpus * self.nodes) * self.gpus + r % self.gpus for r in (src, dst))
        spine = ~inside & (a != b)
        first = self.first
        return [
            np.where(inside, first["near out"], first["out"]) + src,
            np.where(inside, first["near in"], first["in"]) + dst,
            np.where(spine, first["up"] + a, self.none),
            np.where(spine, first["down"] + b, self.none),
        ]

    def delay(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """NVLink inside a node; two switches more through the spine."""
        inside = src // self.gpus == dst // self.gpus
        a, b = (r // (self.gpus * self.nodes) * self.gpus + r % self.gpus for r in (src, dst))
        return np.where(inside, self.near_latency, self.latency + 2 * self.hop * (a != b))

    def leaving(self, busy: np.ndarray) -> np.ndarray:
        """The busier of a GPU's two ports."""
        near = self.first["near out"]
        return np.maximum(busy[: self.n], busy[near : near + self.n])


def speeds_of(given: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Check the speeds of single links; see `Fabric`.

    Raises:
        ArgumentError: For a fraction below 0.
    """
    for name, factor in given.items():
        if not factor >= 0:
            raise ArgumentError(f"link {name} at {factor}: expected a fraction of its speed")
    return tuple(given.items())
