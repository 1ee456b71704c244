"""Train two replica groups with torchft, kill one, start it again, and compare all that they know.

A lighthouse of torchft runs in the first process, and each replica group, of one rank, in one of
its own. The backend is that of the variable ``BACKEND_NAME``.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

REPLICAS, KILLED_AT, STEPS, LIMIT_S = 2, 4, 10, 240


def group_of(backend):
    if backend == "pycoll":
        from pycoll.torch.torchft import ProcessGroupPycoll

        return ProcessGroupPycoll(timeout=timedelta(seconds=20))
    from torchft.process_group import ProcessGroupGloo

    return ProcessGroupGloo(timeout=timedelta(seconds=20))


def replica(name, address, folder):
    """Train to the step that the file ``stop`` says; write each step, and the model at the end."""
    from torchft.ddp import DistributedDataParallel
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper

    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def load(state):
        net.load_state_dict(state["net"])
        plain.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=group_of(os.environ["BACKEND_NAME"]),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{name}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        timeout=timedelta(seconds=20),
    )
    model, optimizer = DistributedDataParallel(manager, net), OptimizerWrapper(manager, plain)
    made, log = torch.Generator().manual_seed(int(name)), folder / f"steps-{name}"
    stop = folder / "stop"
    while not stop.exists() or manager.current_step() < int(stop.read_text()):
        x = torch.randn(8, 4, generator=made)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
        with log.open("a") as file:
            file.write(f"{os.getpid()} {manager.current_step()} {manager.num_participants()}\n")
        time.sleep(0.2)
    torch.save({k: v.clone() for k, v in net.state_dict().items()}, folder / f"end-{name}.pt")
    manager.shutdown()


def rows(folder, name):
    file = folder / f"steps-{name}"
    text = file.read_text() if file.exists() else ""
    return [tuple(map(int, row.split())) for row in text.splitlines() if len(row.split()) == 3]


def reached(folder, name, children, wanted):
    """Wait until a row (process, step, participants) of a replica is as wanted."""
    end = time.monotonic() + LIMIT_S
    while not any(wanted(*row) for row in rows(folder, name)):
        assert time.monotonic() < end, f"replica {name} never came so far: {rows(folder, name)}"
        assert all(c.poll() in (None, 0, -signal.SIGKILL) for c in children), "a replica failed"
        time.sleep(0.05)


def start(name, address, folder):
    return subprocess.Popen([sys.executable, __file__, str(name), address, folder])


def train_and_kill(address, folder):
    children = [start(name, address, folder) for name in range(REPLICAS)]
    try:
        reached(folder, 1, children, lambda _, step, n: step >= KILLED_AT and n == REPLICAS)
        children[1].kill()
        children[1].wait()
        last = max(row[1] for name in range(REPLICAS) for row in rows(folder, name))
        reached(folder, 0, children, lambda _, step, n: step > last + 1 and n == 1)
        children.append(start(1, address, folder))
        again = children[2].pid
        reached(folder, 1, children, lambda p, step, n: p == again and n == REPLICAS)
        soon = folder / "soon"
        soon.write_text(str(rows(folder, 1)[-1][1] + STEPS))
        soon.rename(folder / "stop")
        for child in (children[0], children[2]):
            assert child.wait(LIMIT_S) == 0, f"a replica ended with {child.returncode}"
    finally:
        for child in children:
            child.kill()
            child.wait()
    begun = next(row for row in rows(folder, 1) if row[0] == again)
    assert begun[1] > KILLED_AT, f"the replica began at the beginning, with {begun}"


def main():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        train_and_kill(lighthouse.address(), folder)
        ends = [torch.load(folder / f"end-{name}.pt") for name in range(REPLICAS)]
        for name in range(REPLICAS):
            print(f"replica {name}: process, step, participants", rows(folder, name))
    lighthouse.shutdown()
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    print("the parameters of both are the same bits")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else replica(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
