"""A PyTorch optimizer whose states are sharded over the ranks (ZeRO-1)."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from pycoll import kernels
from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Ledger
from pycoll.parallel.compare import check_same, check_unanimous, gather_problems, vote
from pycoll.parallel.nn.layer import Model, ParameterSpec
from pycoll.parallel.settings import check_number, describe
from pycoll.parallel.state.layout import bucket_elements, make_layouts, make_units, unit_parameters
from pycoll.parallel.state.placement import Placed, Placement
from pycoll.torch.modules.module_parameters import (
    Views,
    chain_of,
    full_name,
    layer_specs,
    trainable,
)
from pycoll.torch.modules.zero_buckets import (
    Group,
    ZeroBucket,
    copy_settings,
    hyperparameters,
    make_bucket,
    part_frozen,
    settings_text,
    sharded_names,
    why_not_flat,
)


def _unscale(
    optimizer: torch.optim.Optimizer, scaler: Any, gradients: Iterable[np.ndarray]
) -> tuple[bool, bool]:
    """Divide gradients by the scale of the loss, if there is one.

    `torch.amp.GradScaler.step` passes itself to a `step` that has an argument `grad_scaler`, and so
    learns what other ranks have found. Later versions are to set the attributes `grad_scale` and
    `found_inf` instead: all ranks still skip the same steps, but each has its own scale.

    Returns whether the loss is scaled, and whether this rank's scaler has found an infinity, which
    may have been clipped since.
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


class ZeroOptimizer(torch.optim.Optimizer):
    """Averages gradients over the ranks and steps one block of the parameters on each.

    ::

        optimizer = ZeroOptimizer(torch.optim.AdamW, module, comm, lr=3e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=1000)
        for inputs, targets in batches:
            loss(module(inputs), targets).backward()  # several times, to accumulate
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    Each rank keeps 1 / n of the optimizer states, and sends what plain data parallelism sends:
    2 (n - 1) / n of the gradients. Gradients and parameters are views of flat buckets. The
    optimizer must treat every element alike (SGD, Adam, AdamW, RMSprop, ...; not LAMB).

    It is an optimizer of PyTorch: schedulers, ``torch.amp.GradScaler`` and hooks take it, and
    `param_groups` has the module's parameters, whose settings hold from the next step on. `state`
    is empty: `state_dict` gathers it. Before `step` gradients are those of this rank: clip them
    with `clip_norm`, not ``clip_grad_norm_``. A parameter without gradient has the gradient zero:
    weight decay and momentum go on. Layers that are split over tensor-parallel ranks are refused;
    `pycoll.torch.data_parallel.DataParallel` trains them.

    Attributes:
        inner: The optimizer of this rank's blocks. Do not step it: alone it has no gradients.
        grad_norm: Norm of the averaged gradient of the last step, before clipping; NaN if that was
            not finite.
    """

    _step_supports_amp_scaling = True  # so that GradScaler leaves it to `step` to skip one
    ledger: Ledger
    grad_norm: float = 0.0

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        module: torch.nn.Module,
        comm: Communicator,
        *,
        groups: Sequence[dict[str, Any]] | None = None,
        bucket_bytes: int = 25 << 20,
        order: str = "tree",
        clip_norm: float | None = None,
        **settings: Any,
    ) -> None:
        """Take over the parameters of a module; a collective.

        All ranks get the parameters of rank 0, once they have compared which those are.

        Args:
            kind: Class of the optimizer, which steps this rank's blocks.
            module: Its trainable parameters are on the CPU and of one type.
            comm: The ranks.
            groups: Parameters with settings of their own, ``{"params": [...], "weight_decay": 0}``,
                as PyTorch takes them; every trainable parameter is in one. None: one group.
            bucket_bytes: Gradient bytes that are reduced in one call.
            order: Order of the sum over ranks.
            clip_norm: Largest norm of the averaged gradient; None: any.
            settings: Further arguments of `kind`.

        Raises:
            ArgumentError: For parameters of several types, on other devices or split over
                tensor-parallel ranks, groups without some, and kinds that mix elements.
            MismatchError: On every rank, if parameters, groups or settings differ; none moved.
        """
        if clip_norm is not None:
            check_number("clip_norm", clip_norm, "(0, inf]")
        given = [{"params": list(module.parameters())}] if groups is None else groups
        super().__init__([dict(g) if isinstance(g, dict) else g for g in given], {})
        self._order, self._clip, self.ledger = order, clip_norm, Ledger()
        facts = [f"optimizer={kind_text(kind)}", f"{bucket_bytes=}", f"{order=!s}", f"{clip_norm=}"]
        self._like_inner = partial(kind, **settings)
        frozen = self._check(kind, module, facts, Channel(comm, "dp", self.ledger))
        model = chain_of(module)
        self._channel = Channel(comm.dup(), "dp", self.ledger)
        self._buckets: list[ZeroBucket] = []
        self.inner: Any = kind(self._make_blocks(model, module, bucket_bytes), **settings)
        self._frozen_states = part_frozen(self.inner, frozen.values())
        parts = [part for bucket in self._buckets for part in bucket.parts]
        self._views = Views("optimizer", module, frozen, parts)
        self.defaults: Any = self.inner.defaults
        copy_settings(self.inner, self)
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing", FutureWarning)

    def _check(
        self, kind: Any, module: torch.nn.Module, facts: Sequence[str], channel: Channel
    ) -> dict[str, torch.Tensor]:
        """Refuse groups, and a kind that mixes elements, on all ranks; see `check_groups`."""
        fault = why_not_flat(self._like_inner, self.param_groups)
        frozen = check_groups(self.param_groups, module, [*facts, f"{fault=}"], channel)
        if fault:
            raise ArgumentError(
                f"{kind_text(kind)} cannot step vectors of many parameters: {fault}. PyTorch's "
                "ZeroRedundancyOptimizer leaves parameters whole"
            )
        return frozen

    def _make_blocks(
        self, model: Model, module: torch.nn.Module, bucket_bytes: int
    ) -> list[dict[str, Any]]:
        """Make the buckets of each group; return the groups of this rank's blocks."""
        params = {full_name(name): p for name, p in trainable(module).items()}
        owned, n = unit_parameters(make_units(model)), self._channel.world_size
        dtype, groups = next(iter(params.values())).detach().numpy().dtype, []
        for group in self.param_groups:
            own = set(group["params"])
            parts = [[x for x in unit if params[x.name] in own] for unit in owned]
            layouts = make_layouts(parts, n, bucket_elements(1, bucket_bytes, dtype.itemsize))
            buckets = [make_bucket(layout, params, dtype, self._channel) for layout in layouts]
            blocks = [bucket.shard for bucket in buckets]
            frozen = [p for p in group["params"] if not p.requires_grad]  # see `part_frozen`
            groups.append({**hyperparameters(group), "params": blocks + frozen})
            self._buckets += buckets
        return groups

    @torch.optim.Optimizer.profile_hook_step  # not by the first rank: ranks may be threads
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None
    ) -> float | Any:
        """Average the gradients, step, and gather the parameters; a collective.

        Args:
            closure: Computes the loss and its gradients, and returns the loss.
            grad_scaler: Passed by ``torch.amp.GradScaler.step``. If the gradient is not finite, no
                rank takes the step, and `update` of all ranks' scalers lowers the scale.

        Returns:
            The loss of the closure; without closure `grad_norm`.

        Raises:
            ArgumentError: On every rank, if the gradient is not finite and there is no scaler; no
                parameter has changed. Also if a parameter of any has another type than at the
                start, or was frozen then.
            MismatchError: On every rank, if their optimizers have different settings; likewise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        problem, scaled, found = self._views.problem(), False, False
        if not problem:  # else `_average` reports it to the others
            self._views.move_back()
            for bucket in self._buckets:
                bucket.view_gradients(keep=True)
            gradients = [bucket.gradient for bucket in self._buckets]
            scaled, found = _unscale(self, grad_scaler, gradients)
        odd = self._average(found, problem)
        if grad_scaler is not None:  # for its `update`
            flag = torch.tensor(float(odd > 0))
            state = grad_scaler._per_optimizer_states[id(self)]
            state["found_inf_per_device"] = {flag.device: flag}
        if not odd:
            self._advance()
        elif not scaled:
            bad = ", ".join(sorted(x for bucket in self._buckets for x in bucket.not_finite()))
            own = f"gradients that are not finite, of {bad}" if bad else ""
            found = gather_problems(own, self._channel) or f"{odd} sums are not finite"
            raise ArgumentError(f"the step was not taken: {found}")
        return self.grad_norm if closure is None else loss

    step.hooked = True  # as `torch.optim.Optimizer` marks what it has wrapped

    def _average(self, found: bool, problem: str) -> int:
        """Average and clip gradients; return how many are not finite, the same on every rank.

        `found` is whether this rank's scaler has found an infinity, `problem` why this rank cannot
        take the step.
        """
        n = self._channel.world_size
        pending = [
            Placed(bucket.gradient, Placement.PARTIAL, self._channel, "gradient").to(
                Placement.SHARD, "gradient", self._order, bucket.shard_gradient
            )
            for bucket in self._buckets
        ]
        limbs, odd = kernels.new_exact_sum(), int(found)
        for bucket, work in zip(self._buckets, pending, strict=True):
            work.wait()
            odd += kernels.add_squares(bucket.shard_gradient, limbs)
        settings = settings_text(self.param_groups)
        vector = np.concatenate([limbs, vote(settings), [odd, bool(problem)]])
        self._channel.all_reduce(vector, "norm").wait()
        limbs, votes, odd = vector[: limbs.size], vector[limbs.size : -2], int(vector[-2])
        if vector[-1]:
            reported = gather_problems(problem, self._channel)
            raise ArgumentError(f"the step was not taken: {reported}")
        check_unanimous(votes, settings, self._channel)
        norm = float("nan") if odd else float(np.sqrt(kernels.exact_sum(limbs))) / n
        scale = 1 / n if self._clip is None or not norm > self._clip else self._clip / norm / n
        for bucket in self._buckets:
            bucket.shard_gradient *= bucket.shard_gradient.dtype.type(scale)
        self.grad_norm = norm
        return odd

    def _advance(self) -> None:
        """Step this rank's shards, and gather them."""
        copy_settings(self, self.inner)
        for bucket in self._buckets:
            bucket.shard.grad = torch.from_numpy(bucket.shard_gradient)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        copy_settings(self.inner, self)
        gathers = [
            Placed(bucket.shard.numpy(), Placement.SHARD, self._channel, "parameter").to(
                Placement.REPLICATE, "parameter", out=bucket.parameter
            )
            for bucket in self._buckets
        ]
        for work in gathers:
            work.wait()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Make all gradients zero; they stay views of the buckets, whatever `set_to_none` says."""
        for bucket in self._buckets:
            bucket.view_gradients(keep=True)  # copies gradients that are elsewhere
            bucket.gradient[...] = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group once buckets are made: all are given to the constructor."""
        if hasattr(self, "inner"):
            raise ArgumentError("parameters have their buckets already; give groups= all groups")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parameters on every rank; a collective.

        Returns:
            What `kind` gives that optimizes the same parameters alone, in its order; any optimizer
            of that class loads it, and so does a `ZeroOptimizer` of any number of ranks.
        """
        states: dict[torch.Tensor, Any] = dict(self._frozen_states)
        for bucket in self._buckets:
            parts = bucket.gather(self.inner.state.get(bucket.shard, {}), self._channel)
            states.update(zip(bucket.params, parts, strict=True))
        params = [p for group in self.param_groups for p in group["params"]]
        self.state.update((p, states[p]) for p in params if states.get(p))
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, or that of an optimizer that is not sharded.

        Every rank is given the same; nothing is sent. Parameters are loaded by the module.

        Raises:
            ArgumentError: If it does not fit the parameters; nothing has changed.
            ValueError: If it has other groups; likewise.
        """
        before = self.param_groups
        super().load_state_dict(state_dict)
        loaded = self.state
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        pairs = [(p, loaded.get(p, {})) for bucket in self._buckets for p in bucket.params]
        hyper, channel = hyperparameters(self.param_groups[0]), self._channel
        sharded = sharded_names(pairs, lambda p: self._like_inner([{**hyper, "params": [p]}]))
        try:
            blocks = {
                bucket.shard: bucket.shard_states(
                    [loaded.get(p, {}) for p in bucket.params], sharded, channel
                )
                for bucket in self._buckets
            }
        except ArgumentError:
            self.param_groups = before
            raise
        self.inner.state = defaultdict(dict, {p: state for p, state in blocks.items() if state})
        self._frozen_states = {p: loaded[p] for p in self._views.frozen.values() if p in loaded}
        copy_settings(self, self.inner)

    def close(self) -> None:
        """Close the communicator; not a collective."""
        self._channel.comm.close()


# --- Parameter groups: their contents, and what all ranks must have alike


def kind_text(kind: Callable[..., Any]) -> str:
    """Name an optimizer's class without its module, which on one rank may be ``__main__``."""
    return getattr(kind, "__qualname__", None) or describe(kind)


def check_groups(
    groups: Sequence[Group], module: torch.nn.Module, facts: Sequence[str], channel: Channel
) -> dict[str, torch.Tensor]:
    """Compare groups over the ranks, then check them; a collective.

    The comparison comes first, so that the checks fail on all ranks or on none. `facts` are further
    settings that have to be the same. Returns the frozen parameters in groups by name.
    """
    names, specs = {p: name for name, p in module.named_parameters()}, layer_specs(module)
    grouped = {p: i for i, group in enumerate(groups) for p in group["params"]}
    missing = {p: name for name, p in trainable(module).items() if p not in grouped}
    lines = [*facts] + [
        f"{group}: {names.get(p, 'not of the module')}, {_kind(p, specs)}"
        for p, group in [(p, f"group {i}") for p, i in grouped.items()]
        + [(p, "no group") for p in missing]
    ]
    check_same(lines, "parameters, groups or settings of ZeroOptimizer", channel)
    if missing:
        raise ArgumentError(f"parameters {', '.join(missing.values())} are in no group")
    if foreign := sum(p not in names for p in grouped):
        raise ArgumentError(f"{foreign} parameters in groups are not of the module")
    split = [names[p] for p in grouped if p.requires_grad and _axis(p, specs) is not None]
    if split:
        raise ArgumentError(
            f"parameters {', '.join(split)} are split over tensor-parallel ranks, which "
            "ZeroOptimizer does not know: each would clip by a norm of its own, and skip steps "
            "alone. Use pycoll.torch.data_parallel.DataParallel(module, loss, mesh), which trains "
            "over dp and tp"
        )
    return {names[p]: p for p in grouped if not p.requires_grad}


def _axis(p: torch.Tensor, specs: Mapping[torch.Tensor, ParameterSpec]) -> int | None:
    return specs[p].tensor_axis if p in specs else None


def _kind(p: torch.Tensor, specs: Mapping[torch.Tensor, ParameterSpec]) -> str:
    """Describe what all ranks must have alike of a parameter, besides its values."""
    trained, axis = "trained" if p.requires_grad else "frozen", _axis(p, specs)
    split = "" if axis is None else f", split along axis {axis}"
    return f"shape {tuple(p.shape)}, {p.dtype} on {p.device}, {trained}{split}"
