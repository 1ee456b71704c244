"""Linear layers that are split over ranks by output features or by input features.

Source: Shoeybi et al., arXiv 1909.08053, section 3; with parts of the sequence between them:
Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pycoll.parallel.arrays import Array, Out
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.nn.layers import affine, affine_gradients, bias_gradient, check_shape
from pycoll.parallel.random import Key, normal_init
from pycoll.parallel.tensor.regions import (
    COPY,
    GATHER_FEATURES,
    GATHER_SEQUENCE,
    REDUCE,
    REDUCE_SCATTER_SEQUENCE,
    Region,
    check_part,
    own_part,
    share,
)

if TYPE_CHECKING:
    from pycoll.comm import Communicator

Params = Mapping[str, Array]


@dataclass(frozen=True)
class ColumnParallelLinear:
    """A linear layer of which each rank computes some of the output features.

    ``[b, s, in]``, the same on every rank, -> ``[b, s, out / n]``; with `sequence_parallel`
    ``[b, s / n, in]`` -> ``[b, s, out / n]``. On one rank it is `Linear`, to the bit.

    Cost: forward none, backward an all-reduce of the input's gradient; see docs/layers.md for the
    variants.

    Attributes:
        in_features: Features of the input.
        out_features: Features of the output, over all ranks.
        key: Name of the layer.
        comm: The tensor-parallel ranks.
        bias: Whether there is a bias.
        gather_output: All-gather the output features: ``[b, s, out]`` on every rank.
        sequence_parallel: The input is this rank's part of the sequence.
        regather: With `sequence_parallel`, keep only this rank's part for the backward pass and
            gather the input again; False keeps all of it, n times the memory.
        std: Standard deviation of the initial weights; by default ``in_features ** -0.5``.
        dtype: Type of the parameters.
        tied_to: Full name of the parameter that the weight is.
    """

    in_features: int
    out_features: int
    key: Key
    comm: Communicator
    bias: bool = True
    gather_output: bool = False
    sequence_parallel: bool = False
    regather: bool = True
    std: float | None = None
    dtype: str = "float32"
    tied_to: str | None = None

    def __post_init__(self) -> None:
        """Refuse features that ranks cannot share evenly."""
        share(self.out_features, self.comm, f"axis 0 of {self.key.name}.weight")

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features // self.comm.world_size, self.in_features

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[out / n, in]`` and bias ``[out / n]``."""
        std = self.in_features**-0.5 if self.std is None else self.std
        here = 0, self.comm.rank, self.comm.world_size
        init = normal_init(self.key.fold("weight"), std, *here)
        weight = ParameterSpec(
            self._shape,
            self.dtype,
            init,
            tied_to=self.tied_to,
            **own_part(0, self.comm),
        )
        bias = ParameterSpec(self._shape[:1], self.dtype, decay=False, **own_part(0, self.comm))
        return {"weight": weight, "bias": bias} if self.bias else {"weight": weight}

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the input."""
        check_part(params["weight"], self._shape, self.comm, f"{self.key.name}.weight")
        check_shape(x, (*x.shape[:-1], self.in_features), f"the input of {self.key.name}")
        whole = GATHER_SEQUENCE.forward(x, self.comm) if self.sequence_parallel else x
        y = affine(whole, params["weight"], params.get("bias"))
        y = GATHER_FEATURES.forward(y, self.comm) if self.gather_output else y
        return y, (x if self.regather else whole)

    def backward_input(self, params: Params, saved: Array, dy: Array) -> Array:
        """Return the gradient of the input, of this rank's part if the sequence is split."""
        dx = affine(self._own(dy), params["weight"].T, None)
        region = GATHER_SEQUENCE if self.sequence_parallel else COPY
        return region.backward(dx, self.comm)

    def backward_weight(
        self, params: Params, saved: Array, dy: Array, out: Out = None
    ) -> dict[str, Array]:
        """Return the gradients of this rank's part."""
        again = self.sequence_parallel and self.regather
        x = GATHER_SEQUENCE.forward(saved, self.comm) if again else saved
        return affine_gradients(x, self._own(dy), self.bias, out)

    def _own(self, dy: Array) -> Array:
        return GATHER_FEATURES.backward(dy, self.comm) if self.gather_output else dy


@dataclass(frozen=True)
class RowParallelLinear:
    """A linear layer of which each rank has some of the input features.

    ``[b, s, in / n]`` -> ``[b, s, out]``, the same on every rank; with `sequence_parallel`
    ``[b, s, in / n]`` -> ``[b, s / n, out]``. The bias is added once, after the sum over ranks.

    Cost: forward an all-reduce of the output, backward none; see docs/layers.md for the variants.

    Attributes:
        in_features: Features of the input, over all ranks.
        out_features: Features of the output.
        key: Name of the layer.
        comm: The tensor-parallel ranks.
        bias: Whether there is a bias.
        sequence_parallel: The output is this rank's part of the sequence.
        std: Standard deviation of the initial weights; by default ``in_features ** -0.5``.
        dtype: Type of the parameters.
    """

    in_features: int
    out_features: int
    key: Key
    comm: Communicator
    bias: bool = True
    sequence_parallel: bool = False
    std: float | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse features that ranks cannot share evenly."""
        share(self.in_features, self.comm, f"axis 1 of {self.key.name}.weight")

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features // self.comm.world_size

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[out, in / n]`` and bias ``[out]``, which every rank has."""
        std = self.in_features**-0.5 if self.std is None else self.std
        here = 1, self.comm.rank, self.comm.world_size
        init = normal_init(self.key.fold("weight"), std, *here)
        specs = {"weight": ParameterSpec(self._shape, self.dtype, init, **own_part(1, self.comm))}
        if self.bias:
            shape, partial = self._shape[:1], self.sequence_parallel
            specs["bias"] = ParameterSpec(shape, self.dtype, sequence=partial, decay=False)
        return specs

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the input, and later the gradient of the whole output."""
        check_part(params["weight"], self._shape, self.comm, f"{self.key.name}.weight")
        where = f"rank {self.comm.rank} of {self.comm.world_size} tensor-parallel ranks"
        shape = (*x.shape[:-1], self._shape[1])
        check_shape(x, shape, f"the input of {self.key.name} on {where}")
        y = self._region.forward(affine(x, params["weight"], None), self.comm)
        if self.bias:
            y += params["bias"]
        return y, {"x": x}

    def backward_input(self, params: Params, saved: dict[str, Array], dy: Array) -> Array:
        """Return the gradient of this rank's features."""
        saved["dy"] = self._region.backward(dy, self.comm)
        return affine(saved["dy"], params["weight"].T, None)

    def backward_weight(
        self, params: Params, saved: dict[str, Array], dy: Array, out: Out = None
    ) -> dict[str, Array]:
        """Return the gradients of this rank's part of the weight, and of the bias."""
        whole = saved.pop("dy") if "dy" in saved else self._region.backward(dy, self.comm)
        found = affine_gradients(saved["x"], whole, bias=False, out=out)
        if self.bias:
            found |= bias_gradient(dy, out)
        return found

    @property
    def _region(self) -> Region:
        return REDUCE_SCATTER_SEQUENCE if self.sequence_parallel else REDUCE
