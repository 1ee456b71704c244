"""Train with Ray Train's TorchTrainer on two workers, and compare with one process.

The backend is that of the variable ``BACKEND_NAME``: a worker asks for it by ``TorchConfig``.
"""

import json
import os
import tempfile
from pathlib import Path

import torch

STEPS, ROWS, WORKERS = 5, 8, 2


def data():
    made = torch.Generator().manual_seed(3)
    x = torch.randn(WORKERS, ROWS, 4, generator=made)
    return x, x.sum(2, keepdim=True).sin()


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def alone():
    """Return the losses of one process that takes the rows of all workers."""
    net, losses = model(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = (t.reshape(WORKERS * ROWS, -1) for t in data())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(config):
    import torch.distributed as dist
    from ray import train

    assert dist.get_backend() == config["backend"], dist.get_backend()
    context = train.get_context()
    assert context.get_world_size() == WORKERS
    net = train.torch.prepare_model(model())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = (t[context.get_world_rank()] for t in data())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(
            mean, dist.ReduceOp.AVG if config["backend"] != "gloo" else dist.ReduceOp.SUM
        )
        losses.append(mean.item() / (WORKERS if config["backend"] == "gloo" else 1))
    if not context.get_world_rank():  # a result of Ray has metrics of checkpoints only
        Path(config["to"]).write_text(json.dumps(losses))
    train.report({"losses": losses})


def main():
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    backend = os.environ["BACKEND_NAME"]
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, object_store_memory=100 << 20)
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "losses"
        TorchTrainer(
            train,
            train_loop_config={"backend": backend, "to": str(to)},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        losses = json.loads(to.read_text())
    ray.shutdown()
    torch.testing.assert_close(losses, alone())
    print("losses", losses)


if __name__ == "__main__":
    main()
