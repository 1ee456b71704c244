"""PyTorch Lightning over pycoll: one argument of the strategy.

torchrun --nproc-per-node 2 examples/torch_lightning.py [backend]
"""

import logging
import sys
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import pycoll.torch  # noqa: F401 - makes the backend known


class Regression(lightning.LightningModule):
    """Learns the product of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(backend: str) -> list[float]:
    """Return the losses, averaged over ranks."""
    lightning.seed_everything(0)
    x = torch.randn(64, 2)
    data = torch.utils.data.TensorDataset(x, x.prod(1, keepdim=True))
    module = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
    return module.losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    backend = sys.argv[1] if len(sys.argv) > 1 else "pycoll"
    losses = train(backend)
    if torch.distributed.get_rank() == 0:
        print(f"{torch.distributed.get_backend()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(*map(repr, losses))
    torch.distributed.destroy_process_group()
