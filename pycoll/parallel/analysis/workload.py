"""What a step of a GPT computes and keeps, by formulas.

Sources: Narayanan et al., SC 2021 (Megatron-LM on GPU clusters), appendix (operations); Korthikanti
et al., "Reducing activation recomputation in large transformer models", MLSys 2023, section 4
(activations).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.dry_run import DryComm
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn.transformer import TransformerConfig
from pycoll.parallel.settings import check_number

_OTHER_NAMES = {  # of the configuration files of GPT-2
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
    "vocab_size": "vocabulary",
    "n_positions": "sequence",
    "n_ctx": "sequence",
}


@dataclass(frozen=True)
class Workload:
    """A GPT and the length of its sequences; the defaults are those of GPT-2 small.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        vocabulary: Number of tokens.
        sequence: Tokens of a sequence.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 50304
    sequence: int = 1024

    def __post_init__(self) -> None:
        """Refuse sizes that are none; ArgumentError."""
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), "[1, inf)", whole=True)
        if self.hidden % self.heads:
            raise ArgumentError(f"hidden={self.hidden} is not divisible by heads={self.heads}")

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        model = self.model()
        specs = (spec for _, layer in model.layers for spec in layer.parameters().values())
        return sum(_count(spec.shape) for spec in specs)

    def model(self, tp: int = 1) -> GPT:
        """Return the model as one of ``tp`` ranks of the axis has it, without its parameters."""
        comm: Any = DryComm({"tp": tp}) if tp > 1 else None
        sizes = (self.hidden, self.heads, self.layers, self.vocabulary, self.sequence)
        return GPT(TransformerConfig(*sizes, comm=comm), seed=0)

    def layer_flops(self) -> float:
        """Floating-point operations of the forward pass of a sequence through a layer."""
        s, h = self.sequence, self.hidden
        return 24.0 * s * h * h + 4.0 * s * s * h

    def attention_flops(self) -> float:
        """Those of them that selective recomputation does again."""
        return 4.0 * self.sequence**2 * self.hidden

    def logits_flops(self) -> float:
        """Floating-point operations of the forward pass of a sequence through the head."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    def activation_bytes(self, sequences: int, tp: int, recompute: str) -> float:
        """Bytes that a layer keeps of ``sequences`` on one of ``tp`` ranks for its backward pass.

        Types have 16 bits; ``recompute`` is as in `Options`.
        """
        s, b, h = self.sequence, sequences, self.hidden
        if recompute == "full":
            return 2.0 * s * b * h
        attention = 5.0 * self.heads * s * s * b / tp if recompute == "none" else 0.0
        return s * b * h * (10 + 24 / tp) + attention

    def logits_bytes(self, sequences: int, tp: int) -> float:
        """Bytes of logits of ``sequences`` and their gradient, a ``tp``-th part, in float32."""
        return 8.0 * self.sequence * sequences * self.vocabulary / tp


@dataclass(frozen=True)
class Speed:
    """How fast a rank computes.

    Attributes:
        flops: Floating-point operations per second, by the sequences of a micro-batch. A tensor-
            parallel rank does a part of them, as if it had a part of the sequences. In between it
            goes with the logarithm of the size; beyond, it stays.
        update_s: Seconds of a step for each parameter that the rank updates, on top.
        overlap: Whether passes hide sums over data-parallel ranks. Where processors do both, the
            time of each adds up.
        host_bytes: Bytes per second, in each direction, to where optimizer states and activations
            can be offloaded: the memory of the host, or a file. 0: nowhere, they stay.
    """

    flops: Mapping[int, float]
    update_s: float = 0.0
    overlap: bool = True
    host_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no speed; ArgumentError."""
        if not self.flops:
            raise ArgumentError("flops is empty, expected a speed for some size of micro-batches")
        for size, value in self.flops.items():
            check_number("a micro-batch of flops", size, "[1, inf)", whole=True)
            check_number("flops", value, "(0, inf)")
        check_number("update_s", self.update_s, "[0, inf)")
        check_number("host_bytes", self.host_bytes, "[0, inf)")

    def flops_of(self, sequences: float) -> float:
        """Return the operations per second with micro-batches of ``sequences``."""
        sizes = sorted(self.flops)
        speeds = [self.flops[size] for size in sizes]
        return float(np.interp(np.log2(sequences), np.log2(sizes), speeds))


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def workload(given: Workload | Mapping[str, Any] | str) -> Workload:
    """Read a workload.

    Args:
        given: One; or sizes by name, also those of GPT-2's configuration files; or a text such as
            ``gpt:layers=24,hidden=2048,heads=16``; or the path of a JSON file with sizes.

    Raises:
        ArgumentError: For names or values that are none.
    """
    if isinstance(given, Workload):
        return given
    if isinstance(given, str):
        given = _of_text(given)
    sizes: dict[str, Any] = {}
    for name, value in given.items():
        known = _OTHER_NAMES.get(name, name)
        if known in {field.name for field in fields(Workload)}:
            sizes[known] = value
    if not sizes:
        names = ", ".join(field.name for field in fields(Workload))
        raise ArgumentError(f"no size of a GPT in {sorted(given)}; expected {names}")
    return replace(Workload(), **sizes)


def _of_text(text: str) -> dict[str, Any]:
    kind, colon, rest = text.partition(":")
    if kind == "gpt" and (colon or not rest):
        pairs = [part.partition("=") for part in filter(None, rest.split(","))]
        known = {field.name for field in fields(Workload)} | set(_OTHER_NAMES)
        for name, _, value in pairs:
            if name not in known or not value.isdecimal():
                raise ArgumentError(
                    f"{text}: {name}={value}; expected numbers of {', '.join(sorted(known))}"
                )
        return {name: int(value) for name, _, value in pairs} or {"layers": Workload.layers}
    try:
        found = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--model {text}: {error}; or write gpt:layers=24,...") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"{text} holds {type(found).__name__}, expected sizes by name")
    return found
