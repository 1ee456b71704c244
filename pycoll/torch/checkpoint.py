"""Checkpoints of `pycoll.parallel` into and from what PyTorch saves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from pycoll.errors import ArgumentError
from pycoll.parallel.checkpoint.folder import candidates
from pycoll.parallel.checkpoint.manifest import PARAMETERS, Manifest
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.parallel.checkpoint.reshard import whole, write
from pycoll.torch.modules.module_parameters import full_name

Path = str | os.PathLike[str]


def to_state_dict(path: Path, kind: str = PARAMETERS) -> dict[str, torch.Tensor]:
    """Return the parameters of the newest checkpoint as a plain ``state_dict``.

    ``module.load_state_dict(to_state_dict(path), strict=False)`` loads them; buffers, such as
    running means, are not in a checkpoint.

    Args:
        path: A checkpoint, or a folder of them.
        kind: ``"parameters"``, or a state of the optimizer such as ``"first_moment"``.

    Raises:
        ArgumentError: If there is no checkpoint, it is damaged, or has no such kind.
    """
    with Reader(candidates(os.fspath(path))[0]) as reader:
        if kind not in reader.manifest.tensors:
            known = ", ".join(reader.manifest.tensors)
            raise ArgumentError(f"the checkpoint has no {kind}; it has {known}")
        reader.verify()
        names = reader.manifest.tensors[kind]
        return {plain_name(name): torch.from_numpy(reader.whole(kind, name)) for name in names}


def from_state_dict(state_dict: Mapping[str, Any], path: Path, steps: int = 0) -> str:
    """Write a checkpoint with the parameters of a plain ``state_dict``; return its path.

    ``pycoll.parallel.load(path, engine, states=False)`` loads it. What is no parameter of the
    module has to be left out: pass ``dict(module.named_parameters())``.

    Args:
        state_dict: Tensors by name; 16-bit ones become float32, without loss.
        path: Folder of checkpoints, which gets a new one.
        steps: What the checkpoint is named after.
    """
    arrays = {name: tensor.detach().cpu() for name, tensor in state_dict.items()}
    wide = {name: t.float() if t.dtype.itemsize == 2 else t for name, t in arrays.items()}
    parts = (whole(PARAMETERS, full_name(name), t.numpy()) for name, t in wide.items())
    return write(path, [parts], Manifest(steps))


def to_dcp(path: Path, target: Path, prefix: str = "") -> None:
    """Write the parameters of the newest checkpoint for `torch.distributed.checkpoint`.

    Args:
        path: A checkpoint, or a folder of them.
        target: Folder for PyTorch's checkpoint.
        prefix: What names begin with there, such as ``"model."``.
    """
    found = {prefix + name: tensor for name, tensor in to_state_dict(path).items()}
    with _alone():
        dcp.save(found, checkpoint_id=target, no_dist=True)


def from_dcp(source: Path, path: Path, prefix: str = "", steps: int = 0) -> str:
    """Write a checkpoint with the parameters that `torch.distributed.checkpoint` saved.

    Args:
        source: Folder of PyTorch's checkpoint.
        path: Folder of checkpoints, which gets a new one.
        prefix: Only tensors whose names begin with this are taken, without it: ``"model."``.
        steps: What the checkpoint is named after.

    Returns:
        The path of the new checkpoint.
    """
    known = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    if not found:
        raise ArgumentError(f"{source} has no tensor whose name begins with {prefix!r}")
    with _alone():
        dcp.load(found, checkpoint_id=source, no_dist=True)
    plain = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return from_state_dict(plain, path, steps)


@contextmanager
def _alone() -> Iterator[None]:
    """Leave out PyTorch's warning that one process saves or loads: it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def plain_name(name: str) -> str:
    """Return the name that a module has for what `full_name` calls so."""
    return name.removeprefix("module.")
