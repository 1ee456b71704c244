"""One object with the communication methods that servers of models call on each of their groups."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from pycoll.torch.errors import BackendArgumentError
from pycoll.torch.inference import ragged
from pycoll.torch.inference.ragged import of_pycoll
from pycoll.torch.operations.ragged import Rows

_HEAD = 2  # numbers in front of a dictionary: version, bytes of the description
_VERSION = 1
_DTYPES = {
    str(dtype)[6:]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


class CpuCommunicator:
    """The communication of one group of a server, on CPU tensors.

    It has the constructor and the methods of the device communicators of vLLM, which SGLang's group
    coordinators have as well; both may be given it. Ranks in arguments are those in the group.
    ``dim`` may be negative. Nothing is added to what the methods of PyTorch check and raise.
    """

    supports_tensor_dict = True

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
    ) -> None:
        """Wrap a group.

        Args:
            cpu_group: A group of the backend ``"pycoll"``.
            device: Where received tensors are made; by default the CPU.
            device_group: The group to communicate through; by default `cpu_group`.
            unique_name: Kept.

        Raises:
            BackendArgumentError: If the group is of another backend.
        """
        self.device: torch.device = torch.device("cpu") if device is None else device
        self.cpu_group = cpu_group
        self.device_group: dist.ProcessGroup = device_group or cpu_group
        self.unique_name = unique_name
        self._group = of_pycoll(self.device_group)
        self.rank: int = self._group.rank()
        self.rank_in_group: int = self.rank
        self.world_size: int = self._group.size()
        self.ranks: list[int] = dist.get_process_group_ranks(self._group)
        self.global_rank: int = dist.get_rank()
        self.global_world_size: int = dist.get_world_size()

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of all ranks in place, and return it."""
        dist.all_reduce(input_, group=self._group)
        return input_

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Fill a tensor with that of a rank, and return it."""
        dist.broadcast(input_, self.ranks[src], group=self._group)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the tensors of all ranks, which have one shape, concatenated along a dimension."""
        return self.all_gatherv(input_, dim, [input_.shape[dim]] * self.world_size)

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: Rows | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Do so for lengths that differ: `sizes`, or exchanged; of a list for each tensor."""
        if isinstance(input_, list):
            return [self.all_gatherv(x, dim, sizes) for x in input_]
        return ragged.all_gatherv(input_, sizes, dim=dim, group=self._group)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum a tensor of all ranks; return this rank's equal share along a dimension."""
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: Rows | None = None
    ) -> torch.Tensor:
        """Do so for shares that differ, of which all ranks know the `sizes`."""
        return ragged.reduce_scatterv(input_, sizes, dim=dim, group=self._group).contiguous()

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return to a rank the tensors of all, which have one shape, along a dimension."""
        mine = self.rank == dst
        parts = [torch.empty_like(input_) for _ in self.ranks] if mine else None
        dist.gather(input_, parts, self.ranks[dst], group=self._group)
        return torch.cat(parts, dim) if mine else None

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        dist.barrier(group=self._group)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a tensor to a rank, by default the next."""
        to = (self.rank + 1) % self.world_size if dst is None else dst
        dist.send(tensor, self.ranks[to], self._group)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Return a tensor from a rank, by default the one before."""
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        of = (self.rank - 1) % self.world_size if src is None else src
        dist.recv(tensor, self.ranks[of], self._group)
        return tensor

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> None:
        """Send a dictionary of tensors, and of what JSON has, to a rank.

        Raises:
            BackendArgumentError: For another key or value; nothing is sent.
        """
        tensors = {key: x for key, x in tensor_dict.items() if isinstance(x, torch.Tensor)}
        forms = {key: [str(x.dtype)[6:], *x.shape] for key, x in tensors.items()}
        others = {key: value for key, value in tensor_dict.items() if key not in tensors}
        try:
            text = json.dumps([list(tensor_dict), forms, others])
            if json.loads(text) != [list(tensor_dict), forms, others]:
                raise TypeError("JSON would change it: tuples, or keys that are no texts")
        except (TypeError, ValueError) as error:
            raise BackendArgumentError(
                f"a dictionary of tensors, numbers, texts, lists of them and None is sent: {error}"
            ) from error
        head = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.send(torch.tensor([_VERSION, head.numel()]), dst)
        for tensor in (head, *(x for x in tensors.values() if x.numel())):
            self.send(tensor, dst)

    def recv_tensor_dict(self, src: int | None = None) -> dict[str, Any]:
        """Return a dictionary from a rank, by default the one before.

        Raises:
            BackendArgumentError: If that rank has another version of pycoll.
        """
        version, nbytes = self.recv(torch.Size([_HEAD]), torch.int64, src).tolist()
        if version != _VERSION:
            raise BackendArgumentError(f"a dictionary of version {version}, expected {_VERSION}")
        head = self.recv(torch.Size([nbytes]), torch.uint8, src)
        keys, forms, found = json.loads(bytes(head.tolist()))
        for key, (name, *shape) in forms.items():
            dtype, size = _DTYPES[name], torch.Size(shape)
            empty = torch.empty(size, dtype=dtype, device=self.device)
            found[key] = self.recv(size, dtype, src) if empty.numel() else empty
        return {key: found[key] for key in keys}

    def destroy(self) -> None:
        """Do nothing: the group belongs to its maker."""
