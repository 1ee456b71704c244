"""What all ranks must have in common: the model at the start, samples and gradients in a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pycoll import kernels
from pycoll.errors import ArgumentError, MismatchError, kind_of
from pycoll.parallel.channels import Channel, Groups
from pycoll.parallel.compare import (
    check_same,
    check_unanimous,
    gather_problems,
    gather_texts,
    name_ranks,
    ranks_with,
    vote,
)
from pycoll.parallel.engine.failure import Failure
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.layout import Parameter, Unit


def check_mesh(parameters: Sequence[Parameter], mesh: Mesh) -> None:
    """Refuse a model whose layers are split over an axis that the mesh does not have.

    Raises:
        ArgumentError: Naming the parameter, or if `mesh` is not a mesh.
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


def check_structure(parameters: Sequence[Parameter], facts: Sequence[str], world: Channel) -> None:
    """Compare parameters and settings, a line for each, over all ranks; a collective.

    Raises:
        MismatchError: On every rank, naming the first one that differs and the ranks.
    """
    check_same([*facts, *map(_line, parameters)], "models or settings", world)


def _line(parameter: Parameter) -> str:
    """Describe a parameter: its shape, and what is not as with most."""
    spec, more = parameter.spec, ""
    if spec.tensor_axis is not None:
        more += f", split along axis {spec.tensor_axis}"
    if spec.sequence:
        more += ", of a part of the sequence"
    if not spec.decay:
        more += ", without weight decay"
    if parameter.uses != 1:
        more += f", used {parameter.uses} times"
    return f"{parameter.name} of shape {spec.shape}{more}"


def check_parts(units: Sequence[Unit], groups: Groups) -> None:
    """Refuse layers that are split over other ranks than those of ``tp``; a collective.

    Raises:
        MismatchError: On every rank, naming the parameter and the ranks.
    """
    every = {name: spec for unit in units for name, spec in unit.specs.items()}
    specs = {name: spec for name, spec in every.items() if spec.tensor_axis is not None}
    if specs:
        _refuse_parts(_other_place(specs, groups.tensor), groups)
        _refuse_parts(_other_partners(specs, groups), groups)


def _other_place(specs: Mapping[str, ParameterSpec], tensor: Channel) -> str:
    """Describe the first parameter that has another part than this rank's place along tp."""
    place = (tensor.rank, tensor.world_size)
    for name, part in ((name, spec.tensor_part) for name, spec in specs.items()):
        if part not in (None, place):
            part, place = (f"{rank} of {size}" for rank, size in (part, place))
            return f"{name} differs from the mesh: part {part} in place {place}"
    return ""


def _other_partners(specs: Mapping[str, ParameterSpec], groups: Groups) -> str:
    """Describe the first parameter that is split over ranks with the right places, but others."""
    me = np.array([groups.world.rank])
    right, seen, problem = groups.tensor.gather_rows(me, "check")[:, 0].tolist(), set(), ""
    for name, comm in ((name, spec.tensor_comm) for name, spec in specs.items()):
        if comm is None or id(comm) in seen:
            continue
        seen.add(id(comm))
        plain = getattr(comm, "comm", comm)  # a meter would count this call as the layers'
        found = np.asarray(plain.all_gather(me)).tolist()
        if found != right and not problem:  # go on: others wait for this rank in the next one
            ranks = f"{name_ranks(found)} in place of {name_ranks(right)}"
            problem = f"{name} differs from the mesh: split over {ranks}"
    return problem


def _refuse_parts(text: str, groups: Groups) -> None:
    seen, ranks = gather_texts(text, groups.world), groups.world.ranks
    texts = [text for text in dict.fromkeys(seen) if text]
    found = [f"{text} along tp, on {ranks_with(seen, text, ranks)}" for text in texts]
    if found:
        raise MismatchError(
            f"parameter {'; parameter '.join(found)}: a layer has to be split over the mesh's tp "
            "axis, not over another; make it with the communicator mesh.tp"
        )


def most_micro_batches(micro_batches: Any, groups: Groups, refused: str = "") -> int:
    """Return the largest number of micro-batches of a rank; a collective.

    `refused` is another reason why this rank cannot take a step.

    Raises:
        ArgumentError: On every rank, if any has something else or cannot take the step, or none
            has a micro-batch.
        MismatchError: On every rank, if those of a ``tp`` group have different numbers of them.
    """
    problem = refused or _not_micro_batches(micro_batches)
    count = (-2 if refused else -1) if problem else len(micro_batches)
    counts = groups.world.gather_rows(np.array([count]), "count")[:, 0]
    if (counts < 0).any():
        problems = gather_problems(problem, groups.world)
        if (counts >= -1).all():
            problems += (
                "; expected a sequence of (inputs, targets), such as a list, with one pair for "
                "each micro-batch"
            )
        raise ArgumentError(f"the step was not taken: {problems}")
    axes = groups.axes
    for axis in (name for name in ("tp", "cp") if name in axes):
        if np.ptp(counts.reshape(tuple(axes.values())), list(axes).index(axis)).any():
            ranks = groups.world.ranks
            each = "; ".join(f"{ranks_with(counts, n, ranks)}: {n}" for n in np.unique(counts))
            raise MismatchError(
                f"the step was not taken: ranks of one {axis} group, which share their samples, "
                f"have different numbers of micro-batches: {each}"
            )
    if not counts.any():
        raise ArgumentError("no rank has a micro-batch")
    return int(counts.max())


def _not_micro_batches(micro_batches: Any) -> str:
    """Return what is wrong; takes no item of a sequence that may make it only when asked."""
    sized = hasattr(micro_batches, "__len__") and hasattr(micro_batches, "__getitem__")
    if not sized or isinstance(micro_batches, (Mapping, str, bytes)):
        return f"{kind_of(micro_batches)} in place of micro-batches"
    if isinstance(micro_batches, (list, tuple)):
        count = len(micro_batches)
        wrong = (not_a_sample(sample, j, count) for j, sample in enumerate(micro_batches))
        return next(filter(None, wrong), "")
    return ""


def not_a_sample(sample: Any, j: int, count: int) -> str:
    """Return what is wrong with micro-batch j of ``count``."""
    if not isinstance(sample, (list, tuple)):
        return f"{kind_of(sample)} as micro-batch {j} of {count}"
    return f"only {len(sample)} of two parts in micro-batch {j}" if len(sample) < 2 else ""


def take_sample(
    micro_batches: Any, j: int, failure: Failure, problems: list[str]
) -> Sequence[Any] | None:
    """Return micro-batch j, which may be made just now; None if there is none, or after a failure.

    What is no pair is a problem, and one is enough; alone, a rank raises it as `ArgumentError`.
    """
    count = len(micro_batches)
    if j >= count or failure.error is not None:
        return None
    with failure:
        sample: Sequence[Any] = micro_batches[j]
        if not (problem := not_a_sample(sample, j, count)):
            return sample
        problem = f"{problem}, expected (inputs, targets)"
        if failure.alone:
            raise ArgumentError(f"the step was not taken: {problem}")
        problems[:] = problems or [problem]
    return None


class Graphs:
    """The parameters that got gradients in the first micro-batch, of each part of the model."""

    def __init__(self, unused: str) -> None:
        self._free = unused == "zero"
        self._first: dict[int, frozenset[str]] = {}

    def problems(self, j: int, buckets: Sequence[Bucket], part: int = 0) -> list[str]:
        """Return a problem if micro-batch j gave gradients of others to the buckets of a part."""
        if self._free:
            return []
        arrived = frozenset().union(*(bucket.gradients.arrived for bucket in buckets))
        if arrived == (first := self._first.setdefault(part, arrived)):
            return []
        names = ", ".join(sorted(arrived ^ first))
        return [f"a changed graph: in micro-batch {j} gradients of {names} came or stayed away"]


def agree(
    ready: Iterable[Bucket],
    buckets: Sequence[Bucket],
    groups: Groups,
    problems: Sequence[str],
    forgiving: bool,
    settings: str,
    told: np.ndarray | None = None,
) -> tuple[float, bool]:
    """Form the norm of the summed gradient over all ranks; a collective of a few hundred bytes.

    Every element counts on exactly one rank, and squares are added without rounding, so that the
    norm is the same for every mesh, stage and bucket size.

    The reductions of the buckets have been started; `ready` yields those that count here, each when
    its own is over. `problems` are those of this rank, `settings` has to be the same on all ranks,
    and `forgiving` accepts gradients that are not finite. `told` are numbers that one rank knows,
    where the others have zeros; it is filled in on all ranks.

    Returns:
        The norm, and whether a gradient is not finite on any rank.

    Raises:
        ArgumentError: On every rank, if any has a problem.
        MismatchError: On every rank, if they have different settings.
    """
    limbs, bad = kernels.new_exact_sum(), set()
    odd = sum(bucket.add_squares(limbs, bad) for bucket in ready)
    own = set().union(*(bucket.gradients.bad for bucket in buckets))
    words = np.zeros(0, np.int64) if told is None else told.view(np.int64)
    vector = np.concatenate([limbs, words, vote(settings), [odd, bool(own), len(problems)]])
    groups.world.total(vector, "norm")
    limbs, words[:], votes = np.split(vector[:-3], [limbs.size, limbs.size + words.size])
    check_unanimous(votes, settings, groups.world)
    odd, blamed, wrong = map(int, vector[-3:])
    odd += blamed  # also what only a rank has whose copy does not count
    if wrong or (odd and not forgiving):
        texts, names = list(problems), ", ".join(sorted(own if blamed else bad))
        if odd and names:
            fault = "gradients that are not finite" if blamed else "part of an infinite sum"
            texts.append(f"{fault}, of {names}")
        found = gather_problems("; ".join(texts), groups.world)
        raise ArgumentError(f"the step was not taken: {found}")
    norm = math.sqrt(kernels.exact_sum(limbs))
    return (math.inf if odd else norm), odd > 0


def reduced(buckets: Sequence[Bucket], groups: Groups) -> Iterator[Bucket]:
    """Yield each bucket once its gradient is reduced, one call over the replicas ahead."""
    ahead, waiting = groups.replica.world_size > 1, []
    for bucket in buckets:
        waiting.append((bucket, bucket.gradients.finish()))
        if len(waiting) > ahead:
            first, pending = waiting.pop(0)
            pending.wait()
            yield first
    for bucket, pending in waiting:
        pending.wait()
        yield bucket
