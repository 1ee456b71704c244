"""The settings of a data-parallel run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import shared_array
from pycoll.parallel.optim import SGD, AdamW, Optimizer, is_optimizer
from pycoll.parallel.precision import LossScale, Precision, dtype_of, recipe
from pycoll.parallel.settings import check_number, describe
from pycoll.parallel.state.averaging import Average, DiLoCo
from pycoll.parallel.state.gradients import Settings
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Layout, Parameter, bucket_elements, make_layouts
from pycoll.parallel.state.placement import PRESETS

_ACCEPTED = {
    "zero": (0, 1, 2, 3),
    "order": ("tree", "rank", "any"),
    "start": ("check", "broadcast", "trust"),
    "nonfinite": ("error", "skip"),
    "unused": ("zero", "error"),
    "device": ("cpu", "cuda"),
    "offload": ("none", "activations", "optimizer", "all"),
}
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer": (is_optimizer, "an optimizer, such as AdamW(lr=3e-4) of pycoll.parallel"),
    "loss_scale": (lambda x: x is None or isinstance(x, LossScale), "a LossScale, or None"),
    "hook": (lambda x: x is None or isinstance(x, Hook), "a Hook, or None"),
    "averaging": (lambda x: isinstance(x, Average | DiLoCo), "Average(), DiLoCo() or Gossip()"),
    "wrap": (callable, "a function of one array"),
    "recompute": (
        lambda x: x in ("none", "full", "selective") or (type(x) is int and x > 0),
        "none, full, selective, or a number of layers",
    ),
}


def _as_it_is(array: Any) -> Any:
    """Return ``array``, as `Options.wrap` does by default."""
    return array


@dataclass(frozen=True)
class Options:
    """Keyword arguments of `DataParallel`.

    Attributes:
        zero: ZeRO stage: 0 replicates everything, 1 shards optimizer states, 2 gradients as well, 3
            parameters as well.
        optimizer: Updates the parameters.
        order: Order of all sums: ``"tree"``, ``"rank"`` or ``"any"``; see docs/parallel.md.
        bucket_bytes: Gradient bytes that are reduced in one call; with stage 3 a bucket is a layer.
        precision: A recipe, or the name of one: ``fp32``, ``fp64``, ``fp16``, ``bf16``,
            ``fp16_copy``.
        loss_scale: Factor of the loss, which falls when gradients overflow. None: 2**15 where the
            recipe needs one; elsewhere the loss is as it is.
        clip_norm: Largest norm of the mean gradient, above 0; a longer one is shortened. None and
            infinity: any.
        hook: Reduces buckets; see `pycoll.parallel.Hook`.
        prefetch: Layers that stage 3 gathers ahead.
        start: ``"check"``: raise if parameters differ between ranks; ``"broadcast"``: use those of
            the first rank; ``"trust"``: neither.
        nonfinite: What to do about infinite gradients if the loss is not scaled: ``"error"``, or
            ``"skip"`` the step.
        unused: A parameter without a gradient: ``"zero"``, or ``"error"`` if it had one in the
            first micro-batch, or the other way round (a changed graph).
        fused: Use fused kernels, or else the same formulas in array operations.
        wrap: Converts arrays of the engine for the layers, sharing memory, such as
            ``torch.from_numpy``.
        recompute: ``"full"``: of each layer only the input is kept for the backward pass, which
            runs the layer forward again; about a third more computation. Layers that draw random
            numbers must draw the same ones, as `pycoll.parallel.nn.Dropout` does. A number k:
            the same, keeping the input of every k-th layer. ``"selective"``: layers with a method
            ``forget`` drop what takes much memory and little time, such as the weights of
            attention, and make it again. ``"none"``: a layer keeps what its backward pass needs.
        offload: What is in a file, or with ``device="cuda"`` in the memory of the host:
            ``"activations"``, what layers keep for the backward pass, while it is not needed;
            ``"optimizer"``, the states of the optimizer; ``"all"`` or ``"none"`` of them. See
            docs/parallel.md.
        offload_dir: The directory of that file, which may differ between ranks; None: that of
            temporary files.
        device: Where parameters, gradients and states are: ``"cpu"``, in NumPy arrays, or
            ``"cuda"``, in CuPy arrays on the current device of each rank.
        sync_every: The ranks along ``replica`` reduce no gradients, but average after so many calls
            of `step`. None: they reduce gradients in every step.
        sync_after: So many steps at first are taken with `sync_every` as without it.
        averaging: What they do then.
    """

    zero: int = 0
    optimizer: Optimizer = field(default_factory=AdamW)
    order: str = "tree"
    bucket_bytes: int = 25 << 20
    precision: str | Precision = "fp32"
    loss_scale: LossScale | None = None
    clip_norm: float | None = None
    hook: Hook | None = None
    prefetch: int = 1
    start: str = "check"
    nonfinite: str = "error"
    unused: str = "zero"
    fused: bool = True
    wrap: Callable[[Any], Any] = _as_it_is
    device: str = "cpu"
    recompute: str | int = "none"
    offload: str = "none"
    offload_dir: str | None = None
    sync_every: int | None = None
    sync_after: int = 0
    averaging: Average | DiLoCo = field(default_factory=Average)

    def __post_init__(self) -> None:
        """Refuse what cannot be used.

        Raises:
            ArgumentError: Naming the setting and what is accepted.
        """
        for name, (fits, expected) in _KINDS.items():
            value = getattr(self, name)
            if not fits(value):
                text = " ".join(repr(value).split())  # of PyTorch it has many lines
                raise ArgumentError(f"{name}={text}; expected {expected}")
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if value not in accepted:
                listed = ", ".join(map(str, accepted))
                raise ArgumentError(f"{name}={value!r} is not known; accepted: {listed}")
        check_number("prefetch", self.prefetch, "[0, inf)", whole=True)
        check_number("bucket_bytes", self.bucket_bytes, "[1, inf)")
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "(0, inf]")
        if self.sync_every is not None:
            check_number("sync_every", self.sync_every, "[1, inf)", whole=True)
            check_number("sync_after", self.sync_after, "[0, inf)", whole=True)
            if self.scaling[1] or self.nonfinite == "skip" or self.device != "cpu":
                raise ArgumentError(
                    "sync_every: replicas would skip steps alone; use a recipe without loss scale, "
                    "nonfinite='error' and device='cpu'"
                )
        elif self.sync_after or self.averaging != Average():
            name = "sync_after" if self.sync_after else "averaging"
            raise ArgumentError(f"{name}={getattr(self, name)!r} is for sync_every, which is None")
        if self.offloads("activations") and (problem := _unfit(self.wrap, self.device)):
            raise ArgumentError(
                f"offload={self.offload!r} and wrap={describe(self.wrap)}: {problem}; "
                "offload='optimizer' goes with every wrap"
            )
        kind, hook = self.recipe.gradient, self.hook
        if hook is not None and self.zero not in hook.stages:
            raise ArgumentError(
                f"{type(hook).__name__} keeps what it has not sent of all gradients on every rank, "
                f"and parameters, which it does not compress, would be two thirds of the bytes: "
                f"use it with zero={', '.join(map(str, hook.stages))}, not {self.zero}"
            )
        if hook is not None and type(hook) is not Hook and dtype_of(kind).itemsize < 4:
            name = type(hook).__name__
            raise ArgumentError(f"{name} compresses float32; precision has {kind} gradients")
        if hook is not None and self.device not in hook.devices:
            raise ArgumentError(
                f"{type(hook).__name__} is for device={', '.join(hook.devices)}, not {self.device}"
            )

    def offloads(self, what: str) -> bool:
        """Tell whether ``what``, ``"activations"`` or ``"optimizer"`` states, are not in memory."""
        return self.offload in (what, "all")

    @property
    def recipe(self) -> Precision:
        """The number formats."""
        return recipe(self.precision)

    @property
    def scaling(self) -> tuple[LossScale, bool]:
        """The first scale of the loss, and whether an overflow is routine."""
        if self.loss_scale is not None:
            return self.loss_scale, True
        if self.recipe.loss_scaling:
            return LossScale(), True
        return LossScale(1.0, growth=1.0, backoff=1.0), False

    @property
    def settings(self) -> Settings:
        """The settings of buckets."""
        preset, hook = PRESETS[self.zero], self.hook or Hook()
        return Settings(preset, self.recipe, self.order, self.optimizer, hook, self.fused)

    def layouts(self, parameters: Sequence[Sequence[Parameter]], shards: int) -> list[Layout]:
        """Return the layouts of the buckets for ``shards`` ranks, given ``parameters`` by unit."""
        itemsize = dtype_of(self.recipe.gradient).itemsize
        elements = bucket_elements(self.zero, self.bucket_bytes, itemsize)
        return make_layouts(parameters, shards, elements)

    def step_facts(self, **more: Any) -> str:
        """Describe the settings that determine the parameters of a step, a line each; ``more`` too.

        An optimizer may have changed since `facts`, on one rank alone.
        """
        return "\n".join(_lines(more | {"clip_norm": self.clip_norm, "optimizer": self.optimizer}))

    def facts(self) -> list[str]:
        """Describe the settings that have to be the same on every rank, a line for each.

        `fused`, `wrap` and `offload_dir` change no result.
        """
        free = ("fused", "wrap", "offload_dir")
        names = [field.name for field in fields(self) if field.name not in free]
        return _lines({name: getattr(self, name) for name in names} | {"precision": self.recipe})


def changed(options: Options | None, changes: dict[str, Any]) -> Options:
    """Return options, by default those of `Options`, with changes by name.

    Raises:
        ArgumentError: For a name that no option has, and what `Options` refuses.
    """
    if options is not None and not isinstance(options, Options):
        text = " ".join(repr(options).split())
        raise ArgumentError(f"options={text}; expected Options, or settings by name: optimizer=...")
    known = [field.name for field in fields(Options)]
    if unknown := [name for name in changes if name not in known]:
        name = unknown[0]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        for kind in (SGD, AdamW):
            if name in (field.name for field in fields(kind)):
                hint = f"optimizers have it, as in optimizer={kind.__name__}({name}=...)"
        raise ArgumentError(f"there is no option {name}; {hint}")
    return replace(options or Options(), **changes)


def _unfit(wrap: Callable[[Any], Any], device: str) -> str:
    """Return why arrays that layers keep cannot be moved, if so."""
    probe = np.zeros(2, np.float32)
    try:
        if (wrapped := wrap(probe)) is probe:
            return ""
        shared = shared_array(wrapped, kind := type(wrapped))
    except Exception as error:
        return f"that fails for an array of NumPy: {type(error).__name__}: {error}"
    if device != "cpu":
        return f"with device={device!r} layers have to keep arrays of CuPy"
    if shared is None or not np.shares_memory(shared, probe):
        return f"numpy.asarray does not give the memory of a {kind.__name__}"
    return ""


def _lines(settings: dict[str, Any]) -> list[str]:
    return [f"{name}={describe(value)}" for name, value in settings.items()]
