"""Layers made of layers: one after the other, and with a residual connection."""

from __future__ import annotations

from typing import Any, NamedTuple

from pycoll.parallel.arrays import Array, Out, put
from pycoll.parallel.nn.layer import Grads, Layer, ParameterSpec, Params, takes_out


class _Trace(NamedTuple):
    """The state of a chain for one input."""

    saved: list[Any]  # of each layer
    gradients: list[Array]  # of each layer's output; empty until `backward_input`


class Chain:
    """Layers one after the other, as one layer.

    Parameter ``p`` of the layer ``a`` is named ``a.p``. `backward_weight` uses the gradients that
    `backward_input` has stored, and frees them and what the layers have saved.
    """

    def __init__(self, *layers: tuple[str, Layer]) -> None:
        """Join layers.

        Args:
            *layers: ``(name, layer)`` in the order in which they are applied.
        """
        self.layers = layers
        self._names = [
            [(short, f"{name}.{short}") for short in layer.parameters()] for name, layer in layers
        ]
        self._placing = {name for name, layer in layers if takes_out(layer)}

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return those of all layers."""
        return {
            f"{name}.{short}": spec
            for name, layer in self.layers
            for short, spec in layer.parameters().items()
        }

    def forward(self, params: Params, x: Any) -> tuple[Array, Any]:
        """Apply the layers."""
        trace = _Trace([], [])
        for (_, layer), names in zip(self.layers, self._names, strict=True):
            x, saved = layer.forward({short: params[full] for short, full in names}, x)
            trace.saved.append(saved)
        return x, trace

    def forget(self, saved: _Trace) -> _Trace:
        """Drop what the layers can make again."""
        for i, (_, layer) in enumerate(self.layers):
            if forget := getattr(layer, "forget", None):
                saved.saved[i] = forget(saved.saved[i])
        return saved

    def backward_input(self, params: Params, saved: _Trace, dy: Array) -> Any:
        """Go back through the layers, from the last to the first."""
        saved.gradients[:] = [None] * len(self.layers)
        for i in reversed(range(len(self.layers))):
            saved.gradients[i] = dy
            own = {short: params[full] for short, full in self._names[i]}
            dy = self.layers[i][1].backward_input(own, saved.saved[i], dy)
        return dy

    def backward_weight(self, params: Params, saved: _Trace, dy: Array, out: Out = None) -> Grads:
        """Return the gradients of all parameters."""
        if not saved.gradients:
            Chain.backward_input(self, params, saved, dy)
        found = {}
        for (name, layer), names in zip(self.layers, self._names, strict=True):
            held, gradient = saved.saved.pop(0), saved.gradients.pop(0)
            own = {short: params[full] for short, full in names}
            places = {short: out[full] for short, full in names if full in out} if out else {}
            extra = {"out": places} if name in self._placing else {}
            for short, value in layer.backward_weight(own, held, gradient, **extra).items():
                found[f"{name}.{short}"] = put(value, places.get(short))
        return found


class Residual(Chain):
    """``y = x + chain(x)``."""

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Apply the layers and add the input."""
        y, saved = super().forward(params, x)
        return x + y, saved

    def backward_input(self, params: Params, saved: _Trace, dy: Array) -> Array:
        """Add the gradient that passes by the layers."""
        return dy + super().backward_input(params, saved, dy)
