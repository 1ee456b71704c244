"""What a model is: layers with an explicit forward and backward, parameters passed in.

There is no automatic differentiation. A layer specifies its parameters; the engine that runs it
decides where they live, passes them in for one call and takes the gradients. So the same layer runs
on one rank, data-parallel, or with its parameters sharded over many ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array
from pycoll.parallel.channels import LayerComm
from pycoll.parallel.random import Key, normal_init

Params = Mapping[str, Array]
"""Parameters of a layer by name."""
Grads = dict[str, Array]
"""Gradients of parameters by name."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a layer, as this rank holds it.

    Attributes:
        shape: Shape of this rank's part.
        dtype: Type in which the values are made and kept.
        init: Returns the values of this rank's part, already sharded, given `shape`; None: zeros.
        tensor_axis: Axis that is split over the ``tp`` axis of the mesh; None: every rank of it has
            the same values.
        sequence: Not split over ``tp``, but each of its ranks sees only part of the sequence, so
            that gradients must be added over ``tp``.
        decay: Whether weight decay applies.
        tied_to: Full name (``"layer.name"``) of the parameter of another layer that this one is;
            `shape` must be the same, and `init` is not used.
        tensor_part: Which part this is, and of how many: rank and size of the communicator that
            the layer is split over, which have to be those of ``tp``. None: not compared.
        tensor_comm: That communicator, if its ranks are to be compared with those of ``tp``, which
            is one `all_gather` when an engine is made.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    init: Callable[[tuple[int, ...]], Array] | None = None
    tensor_axis: int | None = None
    sequence: bool = False
    decay: bool = True
    tied_to: str | None = None
    tensor_part: tuple[int, int] | None = None
    tensor_comm: Any = field(default=None, repr=False, compare=False)


@runtime_checkable
class Layer(Protocol):
    """A differentiable function with parameters.

    For one input the calls are `forward`, then `backward_input`, then `backward_weight`, with the
    same `saved`, so that `backward_weight` may use what `backward_input` has left there. Between
    them other inputs may go through the layer. Parameters are only read; arrays that come in are
    not modified.
    """

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the specification of each parameter; names are dotted when layers nest."""
        ...

    def forward(self, params: Params, x: Any) -> tuple[Any, Any]:
        """Return the output for ``x`` and what the backward functions need: ``(y, saved)``.

        ``params`` are the parameters by name.

        A layer may have a method ``forget(saved)``, which returns `saved` without what the backward
        functions can make again from the rest at little cost.
        """
        ...

    def backward_input(self, params: Params, saved: Any, dy: Any) -> Any:
        """Return the gradient of the input, given ``params`` and that of the output, ``dy``.

        None where it has none (token numbers).
        """
        ...

    def backward_weight(self, params: Params, saved: Any, dy: Any) -> Grads:
        """Return gradients of ``params`` by name, given ``dy``; one not used may be left out.

        A layer may have one more argument, ``out=None``: arrays by name, not for every parameter.
        Then it writes a gradient to the array of its name, if there is one, and returns that array.
        """
        ...


def split_over(comm: LayerComm | None, axis: int) -> dict[str, Any]:
    """Return the fields of a `ParameterSpec` that is split along an axis; none for one rank."""
    if comm is None or comm.world_size == 1:
        return {}
    part = (comm.rank, comm.world_size)
    return {"tensor_axis": axis, "tensor_part": part, "tensor_comm": comm}


def normal_weight(layer: Any, shape: tuple[int, ...], axis: int = 0, **more: Any) -> ParameterSpec:
    """Return the specification of a normally distributed weight, of which this rank has `shape`.

    The layer has `key`, `std` (None: ``in_features ** -0.5``) and `dtype`. If it has `comm`, `axis`
    is split over these ranks. `more` are other fields.
    """
    if not isinstance(layer.key, Key):
        raise ArgumentError(
            f"{type(layer).__name__} has key={layer.key!r}; expected a Key of "
            "pycoll.parallel.random, such as Key(0).fold('name')"
        )
    comm = getattr(layer, "comm", None)
    std = layer.in_features**-0.5 if layer.std is None else layer.std
    place = () if comm is None else (axis, comm.rank, comm.world_size)
    init = normal_init(layer.key.fold("weight"), std, *place)
    return ParameterSpec(shape, layer.dtype, init, **split_over(comm, axis), **more)


class NoParameters:
    """Base class of layers without parameters."""

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return no specification."""
        return {}

    def backward_weight(self, params: Params, saved: Any, dy: Array) -> Grads:
        """Return no gradient."""
        return {}


def takes_out(layer: Layer) -> bool:
    """Tell whether a layer can write gradients to given arrays; see `Layer.backward_weight`."""
    method = getattr(layer, "backward_weight", None)  # layers that only hold parameters have none
    return method is not None and "out" in inspect.signature(method).parameters


@runtime_checkable
class Loss(Protocol):
    """The function to minimize: a sum over samples, so that any split of a batch adds up."""

    def forward(self, logits: Any, targets: Any) -> tuple[float, int, Any]:
        """Return the sum of losses, the number of samples (or tokens), and ``saved``.

        ``logits`` are outputs of the model, ``targets`` what they should be, sample by sample.
        """
        ...

    def backward(self, saved: Any, scale: float) -> Any:
        """Return the gradient of `scale` times the sum of losses, by logits; `saved` as above."""
        ...


@runtime_checkable
class Model(Protocol):
    """A chain of named layers; each layer is one unit of sharding."""

    @property
    def layers(self) -> Sequence[tuple[str, Layer]]:
        """``(name, layer)`` in forward order."""
        ...


@dataclass(frozen=True)
class Sequential:
    """A chain of named layers: the output of one is the input of the next.

    Attributes:
        layers: ``(name, layer)`` in forward order. Parameter ``p`` of layer ``a`` is named ``a.p``.
    """

    layers: Sequence[tuple[str, Layer]] = field(default_factory=tuple)
