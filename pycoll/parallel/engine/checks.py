"""What all ranks must have in common, checked with a few bytes; errors name parameter and ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.analysis.ledger import Channel
from pycoll.parallel.engine.groups import Groups
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.state.layout import Parameter, Unit

VOTE_WORDS = 6
_PART = (1 << 21) - 1  # of which 4,096 squares have a sum below 2**63


def check_mesh(parameters: Sequence[Parameter], mesh: Mesh) -> None:
    """Refuse a model whose layers are split over an axis that the mesh does not have.

    Raises:
        ArgumentError: Naming the parameter, or for what is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentError(f"mesh={mesh!r}; expected a mesh, such as Mesh(comm, dp=-1)")
    size = mesh.size("tp")
    for parameter in parameters:
        axis, shape = parameter.spec.tensor_axis, parameter.spec.shape
        if axis is None:
            continue
        if size == 1:
            raise ArgumentError(
                f"parameter {parameter.name} is split over tp along its axis {axis}, but "
                f"{mesh} has no tp axis; make model and engine with the same mesh"
            )
        if not 0 <= axis < len(shape):
            raise ArgumentError(
                f"parameter {parameter.name} has shape {shape} and tensor_axis={axis}"
            )


def check_parts(units: Sequence[Unit], groups: Groups) -> None:
    """Refuse layers that are split over other ranks than those of ``tp``; a collective.

    Raises:
        MismatchError: On every rank, naming the parameter and the ranks.
    """
    specs = {
        f"{unit.name}.{local}": spec
        for unit in units
        for local, spec in unit.layer.parameters().items()
        if spec.tensor_axis is not None
    }
    if not specs:
        return
    place, text = (groups.tensor.rank, groups.tensor.world_size), ""
    for name, part in ((name, spec.tensor_part) for name, spec in specs.items()):
        if part is not None and part != place and not text:
            text = (
                f"parameter {name} differs from the mesh: part {part[0]} of {part[1]} in place "
                f"{place[0]} of {place[1]} along tp"
            )
    _refuse_parts(text, groups)
    _refuse_parts(_other_partners(specs, groups), groups)


def _other_partners(specs: Mapping[str, ParameterSpec], groups: Groups) -> str:
    """Tell the first parameter that is split over ranks with the right places, but other ones."""
    me = np.array([groups.world.rank])
    right, seen, told = groups.tensor.gather_rows(me, "check")[:, 0].tolist(), set(), ""
    for name, comm in ((name, spec.tensor_comm) for name, spec in specs.items()):
        if comm is None or id(comm) in seen:
            continue
        seen.add(id(comm))
        plain = getattr(comm, "comm", comm)  # not a meter, which counts what layers send
        found = np.asarray(plain.all_gather(me)).tolist()
        if found != right and not told:  # go on: others wait for this rank in the next one
            told = (
                f"parameter {name} differs from the mesh: split over {_ranks(found)} in place of "
                f"{_ranks(right)} along tp"
            )
    return told


def _refuse_parts(text: str, groups: Groups) -> None:
    seen = gather_texts(text, groups.world)
    if told := "; ".join(f"{t}, on {ranks(seen, t)}" for t in dict.fromkeys(seen) if t):
        raise MismatchError(
            f"{told}: a layer has to be split over the mesh's tp axis, not over another; "
            "make it with the communicator mesh.tp"
        )


def check_structure(parameters: Sequence[Parameter], facts: Sequence[str], world: Channel) -> None:
    """Compare names, shapes, types and settings over all ranks; a collective.

    Args:
        parameters: Those of the model.
        facts: The settings, a line for each.
        world: All ranks.

    Raises:
        MismatchError: On every rank, naming the first setting or parameter that differs and the
            ranks.
    """
    lines = [*facts] + [
        f"{p.name} shape {p.spec.shape} tensor_axis {p.spec.tensor_axis} sequence "
        f"{p.spec.sequence} decay {p.spec.decay} uses {p.uses}"
        for p in parameters
    ]
    check_same(lines, "models or settings", world)


def check_same(lines: Sequence[str], what: str, world: Channel) -> None:
    """Compare lines of text over all ranks; a collective.

    Args:
        lines: In the same order everywhere.
        what: What they tell of, in the plural.
        world: All ranks.

    Raises:
        MismatchError: On every rank, with the first line that differs and the ranks.
    """
    table = world.gather_rows(_digest("\n".join(lines).encode()), "check")
    if (table == table[0]).all():
        return
    if each := _difference(gather_texts("\n".join(lines), world)):
        raise MismatchError(
            f"ranks have different {what}: {each}; they have to be the same everywhere"
        )


def _difference(texts: Sequence[str]) -> str:
    """Tell the first line in which texts differ, and which ranks have what."""
    views = [text.split("\n") for text in texts]
    for i in range(max(map(len, views))):
        seen = [view[i] if i < len(view) else "(nothing)" for view in views]
        if len(set(seen)) > 1:
            return "; ".join(f"{ranks(seen, text)}: {text}" for text in dict.fromkeys(seen))
    return ""


def check_values(
    values: Mapping[str, Any], parameters: Sequence[Parameter], groups: Groups
) -> None:
    """Compare the values of parameters with the ranks that must have the same; a collective.

    Raises:
        MismatchError: On every rank of the mesh, naming parameter and ranks.
    """
    told = ""
    for channel, chosen in (
        (groups.data, list(parameters)),
        (groups.tensor, [p for p in parameters if p.spec.tensor_axis is None]),
    ):
        if not chosen:
            continue
        rows = [_digest(np.ascontiguousarray(values[p.name])) for p in chosen]
        table = channel.gather_rows(np.concatenate(rows), "check")
        table = table.reshape(channel.world_size, len(chosen), -1)
        for i, parameter in enumerate(chosen):
            seen = [bytes(row) for row in table[:, i]]
            if len(set(seen)) > 1 and not told:
                usual = max(seen, key=seen.count)
                odd = [rank for rank, digest in enumerate(seen) if digest != usual]
                told = (
                    f"parameter {parameter.name} differs at the start: {_ranks(odd)} of the "
                    f"{channel.name} group of {channel.world_size} not as the others; "
                    f"{_advice(parameter)}"
                )
    if found := next((text for text in gather_texts(told, groups.world) if text), ""):
        raise MismatchError(told or found)


def _advice(parameter: Parameter) -> str:
    same = "make it from the same seed everywhere, or pass start='broadcast'"
    if parameter.spec.tensor_axis is None:
        return same
    return f"its layer has to be split over the mesh's tp axis, not over another; if it is, {same}"


def vote(value: str) -> np.ndarray:
    """Return `VOTE_WORDS` integers whose sums over ranks tell whether all have the same value."""
    digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
    parts = [int.from_bytes(digest, "little") >> shift & _PART for shift in (0, 21, 42)]
    return np.array([*parts, *(part * part for part in parts)], np.int64)


def check_unanimous(sums: np.ndarray, value: str, channel: Channel) -> None:
    """Compare a text with those of all ranks, given the sums of their votes.

    Votes are all the same if the mean of their squares is the square of their mean.

    Raises:
        MismatchError: On every rank, with the first line that differs and who has what.
    """
    total, half = sums.tolist(), VOTE_WORDS // 2
    n, pairs = channel.world_size, zip(total[:half], total[half:], strict=True)
    if all(n * square == x * x for x, square in pairs):
        return
    told = _difference(gather_texts(value, channel))
    raise MismatchError(f"the step was not taken: ranks have different settings: {told}")


def told_by(texts: Sequence[str]) -> str:
    """Join what ranks have, without those that have nothing to tell."""
    return "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts) if text)


def gather_texts(text: str, channel: Channel) -> list[str]:
    """Return the texts of all ranks; a collective."""
    raw = np.frombuffer(text.encode(), np.uint8)
    sizes = channel.gather_rows(np.array([raw.size]), "check")[:, 0]
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: raw.size] = raw
    table = channel.gather_rows(padded, "check")
    return [bytes(row[:size]).decode() for row, size in zip(table, sizes, strict=True)]


def ranks(seen: Sequence[Any], value: Any) -> str:
    """Name the ranks that have a value: ``"rank 2"``, ``"ranks 0, 1, 3"``."""
    return _ranks([rank for rank, other in enumerate(seen) if other == value])


def _ranks(found: Sequence[int]) -> str:
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _digest(data: Any) -> np.ndarray:
    raw = data if isinstance(data, bytes) else data.tobytes()
    return np.frombuffer(hashlib.blake2b(raw, digest_size=16).digest(), np.uint8)
