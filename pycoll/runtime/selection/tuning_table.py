"""The table that ``pycoll tune`` writes: measured times, and the choices that follow from them.

A table is JSON: a schema and its version, the fingerprint of the machine, and a *world* for every
number and placement of ranks that was measured. What is read is checked field by field: a wrong
table is refused, never half used.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pycoll import _C
from pycoll.algorithms import find
from pycoll.config import VERSION as PYCOLL_VERSION
from pycoll.errors import ArgumentError, ScheduleError
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import Order

SCHEMA, VERSION = "pycoll-tuning", 1
_LEAST, _MOST = 1e-30, 1e30  # of a number by which others are divided; of any
_CPUS = Path("/sys/devices/system/cpu")
_ORDERS = {"", *(order.name.lower() for order in Order)}


@dataclass(frozen=True)
class TunedRule:
    """A choice that measurement has changed."""

    collective: str  # the collective it is about
    order: str  # reduction order that calls ask for; ``""`` where nothing is reduced
    symmetric: bool  # it is for arrays in symmetric memory; otherwise for all others
    # min_bytes, max_bytes: sizes of the full vector that it is for
    min_bytes: int
    max_bytes: int
    algorithm: str  # name of the algorithm that is taken
    seconds: float  # its measured time at the size where it gains most
    default: str  # what would be taken otherwise
    default_seconds: float  # measured time of that, at the same size


@dataclass(frozen=True)
class Time:
    """A measured time."""

    collective: str
    nbytes: int  # size of the full vector
    symmetric: bool  # the arrays were in symmetric memory
    algorithm: str  # name of the algorithm; ``""`` for a call that names none
    order: str  # reduction order that was asked for; ``""`` with an algorithm
    seconds: float  # median over rounds of the time of a call on the slowest rank
    # low, high: the fastest and the slowest round
    low: float
    high: float


@dataclass(frozen=True)
class World:
    """What was measured with some ranks in some places."""

    transport: str  # how the ranks reached each other, in words
    ranks_per_host: tuple[int, ...]
    machine: Machine | Network  # constants of the cost model, for predictions
    times: tuple[Time, ...]  # what was measured
    rules: tuple[TunedRule, ...]  # what follows; the first that fits a call decides
    taken: str = ""  # when and by which command, for people

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """What tells one world from another."""
        return self.transport, self.ranks_per_host

    def rule(self, collective: str, nbytes: int, order: str, symmetric: bool) -> TunedRule | None:
        """Return the line that is about a call, or None."""
        for rule in self.rules:
            if (
                rule.collective == collective
                and rule.order == order
                and rule.symmetric == symmetric
                and rule.min_bytes <= nbytes <= rule.max_bytes
            ):
                return rule
        return None

    def measured(self, collective: str, nbytes: int, symmetric: bool) -> dict[str, Time]:
        """Return the times of the algorithms at the nearest size within a factor of two."""
        near = self._near(collective, nbytes, symmetric)
        return {t.algorithm: t for t in near if t.algorithm}

    def by_itself(self, collective: str, nbytes: int, order: str) -> Time | None:
        """Return the time of a call that named nothing and did what no algorithm does by name."""
        near = self._near(collective, nbytes, False)
        return next((t for t in near if (t.algorithm, t.order) == ("", order)), None)

    def _near(self, collective: str, nbytes: int, symmetric: bool) -> list[Time]:
        known = [t for t in self.times if (t.collective, t.symmetric) == (collective, symmetric)]
        near = min((t.nbytes for t in known), key=lambda s: _distance(s, nbytes), default=0)
        if not near or _distance(near, nbytes) > math.log(2) + 1e-9:
            return []
        return [t for t in known if t.nbytes == near]


def _distance(a: int, b: int) -> float:
    return abs(math.log(max(a, 1) / max(b, 1)))


@dataclass(frozen=True)
class Tuning:
    """All worlds of one machine."""

    fingerprint: dict[str, Any]  # see the function of this name
    worlds: tuple[World, ...] = ()  # what was measured

    def world(self, place: tuple[str, tuple[int, ...]]) -> World | None:
        """Return the world of ranks in these places, or None."""
        return next((world for world in self.worlds if world.place == place), None)

    @property
    def digest(self) -> str:
        """A short text that differs where choices do."""
        rules = [[*world.place, [asdict(rule) for rule in world.rules]] for world in self.worlds]
        return f"{zlib.crc32(json.dumps(rules, sort_keys=True).encode()):08x}"

    def with_world(self, world: World) -> Tuning:
        """Return a table in which a world has been added or replaced."""
        others = tuple(w for w in self.worlds if w.place != world.place)
        return Tuning(self.fingerprint, (*others, world))

    def to_json(self) -> str:
        """Return the text that `parse` reads."""
        document = {
            "schema": SCHEMA,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "worlds": [_world_as_dict(world) for world in self.worlds],
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str) -> Tuning:
        """Read and check a table.

        Raises:
            ArgumentError: The text is no such table, with the place and what was expected.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"it is not JSON: {error}") from None
        _expect(isinstance(document, dict), "the document", "an object", document)
        found = document.get("schema"), document.get("version")
        if found != (SCHEMA, VERSION):
            raise ArgumentError(
                f"its schema and version are {found}, expected {(SCHEMA, VERSION)}: run "
                "`pycoll tune` again"
            )
        prints, worlds = document.get("fingerprint"), document.get("worlds")
        _expect(isinstance(prints, dict), "fingerprint", "an object", prints)
        _expect(isinstance(worlds, list), "worlds", "a list", worlds)
        return cls(prints, tuple(_world(f"worlds[{i}]", world) for i, world in enumerate(worlds)))

    def differences(self, here: dict[str, Any]) -> str:
        """Tell in which points another fingerprint differs; empty if in none."""
        names = [*self.fingerprint, *(name for name in here if name not in self.fingerprint)]
        return ", ".join(
            f"{name} {self.fingerprint.get(name)!r} (here {here.get(name)!r})"
            for name in names
            if self.fingerprint.get(name) != here.get(name)
        )


def _world_as_dict(world: World) -> dict[str, Any]:
    document = {f.name: getattr(world, f.name) for f in fields(world)}
    document["machine"] = {"model": type(world.machine).__name__.lower(), **asdict(world.machine)}
    for name in ("times", "rules"):
        document[name] = [asdict(entry) for entry in getattr(world, name)]
    return document


_MODELS = {"machine": Machine, "network": Network}


def _world(where: str, given: Any) -> World:
    _expect(isinstance(given, dict), where, "an object", given)
    ranks = given.get("ranks_per_host")
    sound = isinstance(ranks, list) and ranks and all(_is(int, r) and r > 0 for r in ranks)
    _expect(sound, f"{where}.ranks_per_host", "numbers of ranks", ranks)
    for name in ("transport", "taken"):
        _expect(isinstance(given.get(name), str), f"{where}.{name}", "a text", given.get(name))
    for name in ("times", "rules"):
        _expect(isinstance(given.get(name), list), f"{where}.{name}", "a list", given.get(name))
    times = [_entry(f"{where}.times[{i}]", Time, t) for i, t in enumerate(given["times"])]
    rules = [_rule(f"{where}.rules[{i}]", r) for i, r in enumerate(given["rules"])]
    machine = _machine(f"{where}.machine", given.get("machine"))
    return World(
        given["transport"], tuple(ranks), machine, tuple(times), tuple(rules), given["taken"]
    )


def _machine(where: str, given: Any) -> Machine | Network:
    _expect(isinstance(given, dict), where, "an object", given)
    model = _MODELS.get(str(given.get("model")))
    _expect(model is not None, f"{where}.model", " or ".join(_MODELS), given.get("model"))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k != "model"}
    machine = _entry(where, model, values)
    for name in {"beta", "bus", "far_beta", "cell_bytes"} & values.keys():
        _expect(values[name] >= _LEAST, f"{where}.{name}", "a number > 0", values[name])
    return machine


def _rule(where: str, given: Any) -> TunedRule:
    rule = _entry(where, TunedRule, given)
    _expect(rule.collective in COLLECTIVES, f"{where}.collective", "a collective", rule.collective)
    _expect(rule.order in _ORDERS, f"{where}.order", "a reduction order", rule.order)
    try:
        find(rule.collective, rule.algorithm)
    except ScheduleError as error:
        raise ArgumentError(f"{where}.algorithm: {error}") from None
    return rule


def _entry(where: str, kind: Any, given: Any) -> Any:
    """Make a flat dataclass of an object with just its fields, each of its type."""
    _expect(isinstance(given, dict), where, "an object", given)
    names = {f.name: f.type for f in fields(kind)}
    _expect(set(given) == set(names), where, f"the fields {', '.join(names)}", sorted(given))
    for name, text in names.items():
        _expect(_CHECKS[str(text)](given[name]), f"{where}.{name}", str(text), given[name])
    return kind(**given)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_CHECKS = {
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: _is(int, v) and 0 <= v < 1 << 63,
    "float": lambda v: (_is(float, v) or _is(int, v)) and 0 <= v <= _MOST,
    "tuple[int, ...]": lambda v: isinstance(v, tuple) and all(_is(int, r) and r > 0 for r in v),
}


def _expect(sound: bool, where: str, expected: str, found: Any) -> None:
    if not sound:
        raise ArgumentError(f"{where} is {str(found)[:80]!r}, expected {expected}")


def fingerprint() -> dict[str, Any]:
    """Return what has to be the same for a table of measured times to be used, ready for JSON."""
    return {
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": caches(),
        "folds": _C.fold_isa(),
        "pycoll": PYCOLL_VERSION,
    }


def cpu_name() -> str:
    """Return the model of the processor, or its architecture where the system hides it."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return " ".join(found[1].split()) if found else platform.machine()


def caches() -> dict[str, int]:
    """Return the sizes in bytes of the data caches of the first core, by level."""
    found = {}
    for index in sorted((_CPUS / "cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)K", read_text(index / "size"))
        if size and read_text(index / "type") != "Instruction":
            found[f"L{read_text(index / 'level')}"] = int(size[1]) << 10
    return found


def read_text(path: str | Path) -> str:
    """Return what a file of the system says, or nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
