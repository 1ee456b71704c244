"""What a training step returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepReport:
    """The result of a training step.

    Attributes:
        loss: Mean loss over all samples of all ranks.
        samples: Number of samples of all ranks.
        grad_norm: Norm of the mean gradient, before clipping; the same on every mesh.
        skipped: Whether parameters were left alone because a gradient was not finite.
        loss_scale: Factor of the loss.
        bytes: Bytes that this rank sent, by purpose.
        waits: Seconds that this rank waited for communication, by purpose.
        peak_bytes: Largest memory of parameters, gradients, states and buffers during the step.
        seconds: Time of the step.
    """

    loss: float
    samples: int
    grad_norm: float
    skipped: bool
    loss_scale: float
    bytes: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    seconds: float = 0.0
