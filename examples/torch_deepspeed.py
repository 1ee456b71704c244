"""DeepSpeed over pycoll: name it in `init_distributed`. Trains with ZeRO, stage 3.

Every rank keeps a part of every parameter, gradient and of the optimizer's state.
DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/torch_deepspeed.py [backend]
"""

import logging
import sys
import warnings

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import pycoll.torch  # noqa: F401 - makes the backend known

CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def train() -> list[float]:
    """Return the losses, averaged over ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(engine(x), x.prod(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # An operator for inference that DeepSpeed would compile first, for more than a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=sys.argv[1] if len(sys.argv) > 1 else "pycoll")
    losses = train()
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(*map(repr, losses))
    dist.destroy_process_group()
