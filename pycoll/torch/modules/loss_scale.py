"""Scaled losses: one decision of all ranks about a step, between ``GradScaler`` and an optimizer.

Source: `torch.amp.GradScaler.step`, on optimizers with ``_step_supports_amp_scaling``. It hands
itself to a `step` that has an argument `grad_scaler`, the one way to tell it what other ranks have
found. Later ones are to set the attributes `grad_scale` and `found_inf` instead: then all ranks
still skip the same steps, but each has its own scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def expect_scaler() -> None:
    """Silence what GradScaler tells its users, who cannot help it, about later ones."""
    warnings.filterwarnings("ignore", "GradScaler is going to stop passing", FutureWarning)


def unscale(
    optimizer: torch.optim.Optimizer, scaler: Any, gradients: Iterable[np.ndarray]
) -> tuple[bool, bool]:
    """Divide gradients by the scale of the loss, if there is one.

    Returns:
        Whether the loss is scaled, and whether this rank's scaler has found an infinity, which may
        have been clipped since.
    """
    if scaler is not None:
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"].name == "READY":  # the user has not called `unscale_`
            scaler.unscale_(optimizer)
        return True, any(float(x) for x in state["found_inf_per_device"].values())
    scale, found = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    if scale is not None:
        for gradient in gradients:
            gradient *= gradient.dtype.type(1 / float(scale))
    return found is not None, found is not None and float(found) > 0


def tell(optimizer: torch.optim.Optimizer, scaler: Any, odd: bool) -> None:
    """Tell the scaler what all ranks have found together, for `GradScaler.update`."""
    if scaler is not None:
        found = torch.tensor(float(odd))
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
