"""Layers that are split over ranks: by output features, by input features, by vocabulary.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (also the embedding, and the loss that does not
gather logits); with parts of the sequence between them: Korthikanti et al., arXiv 2205.05198,
section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.arrays import Array, Out, add_rows, as_indices, namespace, take_rows
from pycoll.parallel.channels import LayerComm
from pycoll.parallel.nn.layer import Grads, ParameterSpec, Params, normal_weight, split_over
from pycoll.parallel.nn.layers import (
    affine,
    affine_gradients,
    bias_gradient,
    check_indices,
    check_shape,
    flat,
)
from pycoll.parallel.nn.losses import SoftmaxCrossEntropy, columns
from pycoll.parallel.random import Key
from pycoll.parallel.tensor.regions import (
    COPY,
    GATHER_FEATURES,
    GATHER_SEQUENCE,
    REDUCE,
    REDUCE_SCATTER_SEQUENCE,
    Region,
)


def _check_divisible(size: int, comm: LayerComm, what: str) -> None:
    """Refuse an axis of a parameter that ranks cannot share evenly."""
    if not hasattr(comm, "world_size"):
        raise ArgumentError(
            f"{what}: comm is {kind_of(comm)}; expected the communicator of the "
            "tensor-parallel ranks, such as mesh.tp"
        )
    if size % comm.world_size:
        raise ArgumentError(
            f"{what} has length {size}, which cannot be split over tensor-parallel ranks 0 to "
            f"{comm.world_size - 1}: {size} is not divisible by {comm.world_size}"
        )


class _SplitLayer:
    """Base of layers with a weight that is split over ranks, along axis `_axis` of `_whole`."""

    in_features: int
    out_features: int
    key: Key
    comm: LayerComm
    sequence_parallel: bool
    _axis = 0

    def __post_init__(self) -> None:
        """Refuse a weight that ranks cannot share evenly."""
        what = f"axis {self._axis} of {self.key.name}.weight"
        _check_divisible(self._whole[self._axis], self.comm, what)

    @property
    def _whole(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def _shape(self) -> tuple[int, int]:
        """Shape of this rank's part of the weight."""
        rows, columns = self._whole
        n = self.comm.world_size
        return (rows, columns // n) if self._axis else (rows // n, columns)

    @property
    def _output(self) -> Region:
        """The end of a layer of which each rank computes a term of the output."""
        return REDUCE_SCATTER_SEQUENCE if self.sequence_parallel else REDUCE

    def _weight(self, params: Params) -> Array:
        """Return this rank's part of the weight; refuse what is none."""
        weight, comm = params["weight"], self.comm
        if tuple(weight.shape) != self._shape:
            raise ArgumentError(
                f"{self.key.name}.weight on rank {comm.rank} of {comm.world_size} tensor-parallel "
                f"ranks has shape {tuple(weight.shape)}, expected {self._shape}; parameters and "
                "layer must be made for the same communicator"
            )
        return weight


@dataclass(frozen=True)
class ColumnParallelLinear(_SplitLayer):
    """A linear layer of which each rank computes some of the output features.

    ``[b, s, in]``, the same on every rank, -> ``[b, s, out / n]``; with `sequence_parallel`
    ``[b, s / n, in]`` -> ``[b, s, out / n]``. On one rank it is `Linear`, to the bit.

    Cost: forward none, backward an all-reduce of the input's gradient; see docs/layers.md for the
    variants.

    Attributes are those of `Linear`, features over all ranks, and:
        comm: The tensor-parallel ranks.
        gather_output: All-gather the output features: ``[b, s, out]`` on every rank.
        sequence_parallel: The input is this rank's part of the sequence.
        regather: With `sequence_parallel`, keep only this rank's part for the backward pass and
            gather the input again; False keeps all of it, n times the memory.
    """

    in_features: int
    out_features: int
    key: Key
    comm: LayerComm
    bias: bool = True
    gather_output: bool = False
    sequence_parallel: bool = False
    regather: bool = True
    std: float | None = None
    dtype: str = "float32"
    tied_to: str | None = None

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[out / n, in]`` and bias ``[out / n]``."""
        specs = {"weight": normal_weight(self, self._shape, tied_to=self.tied_to)}
        if self.bias:
            split = split_over(self.comm, 0)
            specs["bias"] = ParameterSpec(self._shape[:1], self.dtype, decay=False, **split)
        return specs

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the input."""
        weight = self._weight(params)
        check_shape(x, (*x.shape[:-1], self.in_features), f"the input of {self.key.name}")
        whole = GATHER_SEQUENCE.forward(x, self.comm) if self.sequence_parallel else x
        y = affine(whole, weight, params.get("bias"))
        y = GATHER_FEATURES.forward(y, self.comm) if self.gather_output else y
        return y, (x if self.regather else whole)

    def backward_input(self, params: Params, saved: Array, dy: Array) -> Array:
        """Return the gradient of the input, of this rank's part if the sequence is split."""
        dx = affine(self._own(dy), params["weight"].T, None)
        region = GATHER_SEQUENCE if self.sequence_parallel else COPY
        return region.backward(dx, self.comm)

    def backward_weight(self, params: Params, saved: Array, dy: Array, out: Out = None) -> Grads:
        """Return the gradients of this rank's part."""
        again = self.sequence_parallel and self.regather
        x = GATHER_SEQUENCE.forward(saved, self.comm) if again else saved
        return affine_gradients(x, self._own(dy), self.bias, out)

    def _own(self, dy: Array) -> Array:
        return GATHER_FEATURES.backward(dy, self.comm) if self.gather_output else dy


@dataclass(frozen=True)
class RowParallelLinear(_SplitLayer):
    """A linear layer of which each rank has some of the input features.

    ``[b, s, in / n]`` -> ``[b, s, out]``, the same on every rank; with `sequence_parallel`
    ``[b, s, in / n]`` -> ``[b, s / n, out]``. The bias is added once, after the sum over ranks.

    Cost: forward an all-reduce of the output, backward none; see docs/layers.md for the variants.

    Attributes are those of `Linear`, features over all ranks, and:
        comm: The tensor-parallel ranks.
        sequence_parallel: The output is this rank's part of the sequence.
    """

    in_features: int
    out_features: int
    key: Key
    comm: LayerComm
    bias: bool = True
    sequence_parallel: bool = False
    std: float | None = None
    dtype: str = "float32"
    _axis = 1

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[out, in / n]`` and bias ``[out]``, which every rank has."""
        specs = {"weight": normal_weight(self, self._shape, self._axis)}
        if self.bias:
            shape, partial = self._shape[:1], self.sequence_parallel
            specs["bias"] = ParameterSpec(shape, self.dtype, sequence=partial, decay=False)
        return specs

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the input, and later the gradient of the whole output."""
        weight = self._weight(params)
        where = f"on rank {self.comm.rank} of {self.comm.world_size} tensor-parallel ranks"
        what = f"the input of {self.key.name} {where}"
        check_shape(x, (*x.shape[:-1], self._shape[1]), what)
        y = self._output.forward(affine(x, weight, None), self.comm)
        if self.bias:
            y += params["bias"]
        return y, {"x": x}

    def backward_input(self, params: Params, saved: dict[str, Array], dy: Array) -> Array:
        """Return the gradient of this rank's features."""
        saved["dy"] = self._output.backward(dy, self.comm)
        return affine(saved["dy"], params["weight"].T, None)

    def backward_weight(
        self, params: Params, saved: dict[str, Array], dy: Array, out: Out = None
    ) -> Grads:
        """Return the gradients of this rank's part of the weight, and of the bias."""
        whole = saved.pop("dy") if "dy" in saved else self._output.backward(dy, self.comm)
        found = affine_gradients(saved["x"], whole, bias=False, out=out)
        return found | bias_gradient(dy, out) if self.bias else found


@dataclass(frozen=True)
class VocabParallelEmbedding(_SplitLayer):
    """A row of a table for each token, each rank having the rows of some tokens.

    ``[b, s]`` integers, the same on every rank, -> ``[b, s, features]``; with `sequence_parallel`
    ``[b, s / n, features]``.

    Cost: forward an all-reduce (or reduce-scatter) of the output, backward none (or an all-gather).

    Attributes are those of `Embedding`, tokens over all ranks, and:
        comm: The tensor-parallel ranks.
        sequence_parallel: The output is this rank's part of the sequence.
    """

    vocabulary: int
    features: int
    key: Key
    comm: LayerComm
    sequence_parallel: bool = False
    std: float = 0.02
    dtype: str = "float32"

    @property
    def _whole(self) -> tuple[int, int]:
        return self.vocabulary, self.features

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[vocabulary / n, features]``."""
        return {"weight": normal_weight(self, self._shape)}

    def forward(self, params: Params, x: Any) -> tuple[Array, Any]:
        """Return the rows; saves which tokens are this rank's, and where."""
        weight = self._weight(params)
        tokens = as_indices(x, weight)
        check_indices(tokens, self.vocabulary, f"the input of {self.key.name}")
        here, rows = columns(tokens, self._shape[0], self.comm.rank)
        y = namespace(weight).where(here[..., None], take_rows(weight, rows), 0)
        return self._output.forward(y, self.comm), (here, rows)

    def backward_input(self, params: Params, saved: Any, dy: Array) -> None:
        """Return None: token numbers have no gradient."""

    def backward_weight(self, params: Params, saved: Any, dy: Array, out: Out = None) -> Grads:
        """Return the sum of the gradients of each of this rank's rows."""
        here, rows = saved
        xp = namespace(dy)
        mine = xp.reshape(here, (-1,))
        whole = flat(self._output.backward(dy, self.comm))
        rows, place = xp.reshape(rows, (-1,))[mine], (out or {}).get("weight")
        return {"weight": add_rows(self._shape[0], rows, whole[mine, :], place)}


@dataclass(frozen=True)
class VocabParallelCrossEntropy(SoftmaxCrossEntropy):
    """`CrossEntropy` of logits ``[b, s, vocabulary / n]``: each rank has some of the columns.

    Cost: forward three all-reduces of one number for each target (maximum, sum of exponentials,
    logit of the target); backward none.

    Attributes:
        comm: The tensor-parallel ranks.
        ignore_index: Target of rows that do not count.
    """

    comm: LayerComm
    ignore_index: int = -100

    @property
    def _comm(self) -> LayerComm:
        return self.comm
