"""What a rank puts into a call: the elements of its tensors as they are before it, and scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pycoll.errors import ArgumentError
from pycoll.torch.calls.work import Tensors
from pycoll.torch.tensors.layout import Reduction, as_reducible, beside

if TYPE_CHECKING:
    from pycoll.runtime.arrays.symmetric_memory import Memory
    from pycoll.torch.calls.prepare import Calls


def contribution(calls: Calls, x: torch.Tensor, how: Reduction) -> torch.Tensor:
    """Return what a rank puts into a reduction: its elements, or a multiple of them.

    Args:
        calls: Of the group that makes the call.
        x: The elements, contiguous. The multiple lies in symmetric memory if they do.
        how: The reduction.

    Raises:
        ArgumentError: If such elements cannot be combined, or the factor is none of their type.
    """
    as_reducible(x, how.op)  # raises here rather than after other tensors were sent
    if how.factor is None:
        return x
    return torch.mul(x, _factor(x, how.factor), out=beside(x, _memory(calls)))


def _factor(x: torch.Tensor, factor: float | torch.Tensor) -> complex:
    """Return the factor of a PREMUL_SUM as a number that leaves the type of the elements.

    Raises:
        ArgumentError: If it is not a number of that type.
    """
    number = factor.item() if isinstance(factor, torch.Tensor) else factor
    if isinstance(number, complex):
        fits = x.is_complex()
    elif x.is_floating_point() or x.is_complex():
        fits = True
    else:
        low, high = _limits(x.dtype)
        fits = low <= number <= high and number == int(number)
        number = type(low)(number) if fits else number
    if not fits:
        raise ArgumentError(
            f"the factor {number} of PREMUL_SUM is not a number of type {x.dtype}; expected one "
            "that is: multiply the result, or reduce a tensor of another type"
        )
    return number


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype is torch.bool:
        return False, True
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def unwritten(calls: Calls, inputs: Tensors, outputs: list[Tensors]) -> Tensors:
    """Return the inputs of a coalesced call, copied where one before them writes its outputs.

    Args:
        calls: Of the group that makes the call.
        inputs: Those of its calls, in their order, contiguous.
        outputs: What each of these calls writes to.
    """
    if len(inputs) < 2:
        return inputs
    spans = [(*_span(x), len(inputs), i) for i, x in enumerate(inputs)]
    spans += [(*_span(out), i, -1) for i, parts in enumerate(outputs) for out in parts]
    result, memory = list(inputs), _memory(calls)
    for cluster in _clusters(sorted(span for span in spans if span[0] < span[1])):
        first = min(writer for _, _, writer, _ in cluster)
        for *_, i in cluster:
            if i > first:
                result[i] = beside(inputs[i], memory).copy_(inputs[i])
    return result


def _clusters(spans: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Divide stretches of memory, sorted, where no two of different clusters have one in common."""
    clusters, reach = [], 0
    for span in spans:
        if span[0] >= reach:
            clusters.append([])
        clusters[-1].append(span)
        reach = max(reach, span[1])
    return clusters


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins in memory, and where its last element ends."""
    if not tensor.numel():
        return 0, 0
    steps = ((k - 1) * stride for k, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (sum(steps) + 1) * tensor.element_size()


def _memory(calls: Calls) -> Memory | None:
    return calls.session.memory if calls.symmetric else None
