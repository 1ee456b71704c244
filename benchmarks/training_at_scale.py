"""Training steps on simulated networks, beside published ones. It runs no ranks and trains nothing.

* ResNet-50 on 8 to 256 P100 (Goyal et al., arXiv:1706.02677: 8,192 images, about 90% scaling, one
  hour). A GPU computes as fast as the one server that took 29 hours did (NVIDIA's blog on it).
* GPTs on A100 (Narayanan et al., Megatron-LM, SC 2021, table 1). Every GPU computes at one speed,
  150 T operations per second, whatever the sizes of its matrices.
* GPT-3 and Llama 2 on H100 in 8 bits (NVIDIA, NeMo 24.12, performance summary: Megatron Core). A
  GPU computes as fast as they publish for Llama 2 7B on 8 GPUs, which has neither tp nor pp.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from pycoll.parallel import Workload, plan
from pycoll.parallel.analysis.training import Part, step_time
from pycoll.schedule.cost.described import fabric

IMAGES, EPOCHS, BATCH = 1_281_167, 90, 32
HOURS_OF_8 = 29.0
P100 = "rails:gpus=8,bw=6.25Gb,near_bw=20G,latency=20us,fold=200G"  # 50 Gbit/s for 8 GPUs
A100 = "rails:gpus=8,bw=25G,near_bw=300G"
SPEED = 150e12
# billions of parameters, layers, hidden, heads, tp, pp, GPUs, batch, T operations/s of a GPU
MEGATRON = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 30, 3072, 32, 2, 1, 64, 512, 138),
    (7.5, 36, 4096, 32, 4, 1, 128, 512, 142),
    (18.4, 40, 6144, 48, 8, 1, 256, 1024, 135),
    (39.1, 48, 8192, 64, 8, 2, 512, 1536, 138),
    (76.1, 60, 10240, 80, 8, 4, 1024, 1792, 140),
    (145.6, 80, 12288, 96, 8, 8, 1536, 2304, 148),
    (310.1, 96, 16384, 128, 8, 16, 1920, 2160, 155),
    (529.6, 105, 20480, 128, 8, 35, 2520, 2520, 163),
    (1008.0, 128, 25600, 160, 8, 64, 3072, 3072, 163),
)
H100 = "rails:gpus=8,bw=50G,near_bw=450G"
SPEED_8_BITS = 780e12
# model, layers, hidden, heads, vocabulary, sequence, tp, pp, GPUs, batch, micro-batch, and T
# operations/s of a GPU
NEMO = (
    ("GPT-3 5B", 24, 4096, 32, 51200, 2048, 1, 1, 64, 2048, 4, 765),
    ("GPT-3 20B", 44, 6144, 48, 51200, 2048, 2, 1, 64, 256, 2, 750),
    ("GPT-3 175B", 96, 12288, 96, 51200, 2048, 4, 8, 128, 256, 1, 771),
    ("GPT-3 175B", 96, 12288, 96, 51200, 2048, 4, 8, 512, 2048, 2, 888),
    ("Llama 2 13B", 40, 5120, 40, 32000, 4096, 1, 4, 16, 128, 1, 760),
    ("Llama 2 70B", 80, 8192, 64, 32000, 4096, 4, 4, 64, 128, 1, 768),
)


def resnet50() -> Iterator[tuple[float, int]]:
    """Operations of the forward pass of an image, and parameters, of each layer of ResNet-50."""

    def convolution(size: int, kernel: int, inputs: int, outputs: int) -> tuple[float, int]:
        weights = kernel * kernel * inputs * outputs
        return 2.0 * size * size * weights, weights + 2 * outputs  # with those of the norm

    yield convolution(112, 7, 3, 64)
    inputs = 64
    for size, width, blocks in ((56, 64, 3), (28, 128, 4), (14, 256, 6), (7, 512, 3)):
        for block in range(blocks):
            before = size if block or width == 64 else 2 * size
            yield convolution(before, 1, inputs, width)
            yield convolution(size, 3, width, width)
            yield convolution(size, 1, width, 4 * width)
            if block == 0:
                yield convolution(size, 1, inputs, 4 * width)
            inputs = 4 * width
    yield 2.0 * 2048 * 1000, 2048 * 1000 + 1000


def images() -> None:
    """Print steps of ResNet-50 by number of GPUs."""
    layers = list(resnet50())
    alone = HOURS_OF_8 * 3600 * 8 / (IMAGES * EPOCHS) * BATCH  # seconds of a step
    speed = 3 * BATCH * sum(flops for flops, _ in layers) / alone
    parts = [Part(f * BATCH / speed, 2 * f * BATCH / speed, 4 * w) for f, w in layers]
    total = sum(weights for _, weights in layers)
    print(f"\nResNet-50, {total / 1e6:.1f} million parameters, 32 images and")
    print(f"{speed / 1e12:.1f} T operations/s of each GPU, buckets of 25 MB\n")
    print("| GPUs | step | hidden sums | not hidden | scaling | with noise | hours |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    first = None
    for n in (8, 16, 32, 64, 128, 256):
        plain, noisy = (step_time(parts, fabric(P100, n), noise_s=s) for s in (0.0, 0.025 * alone))
        first = first or (plain.total, noisy.total)
        hours = EPOCHS * IMAGES / (BATCH * n) * noisy.total / 3600
        hidden = plain.reducing - plain.exposed
        scaling = [f"{a / b.total:.1%}" for a, b in zip(first, (plain, noisy), strict=True)]
        shown = [f"{1e3 * s:.1f} ms" for s in (plain.total, hidden, plain.exposed)]
        print(f"| {n} | {' | '.join(shown)} | {' | '.join(scaling)} | {hours:.2f} |")
    print("\npublished: about 90% from 8 to 256, 1 hour. Noise: a rank loses 2.5% of a step on")
    print("average, which is a guess: the publication says nothing of it.")


def megatron(most: float) -> None:
    """Print GPTs beside Megatron's."""
    print(f"\nGPTs on A100, {SPEED / 1e12:g} T operations/s, all activations again\n")
    print("| parameters | GPUs | tp, pp | schedule, micro-batch | step | here | published | off |")
    print("|---:|---:|---|---|---:|---:|---:|---:|")
    offs = []
    for billions, layers, hidden, heads, tp, pp, n, batch, published in MEGATRON:
        if billions > most:
            continue
        work = Workload(layers, hidden, heads, 51200, 2048)
        fixed = {"tp": tp, "pp": pp, "recompute": "full", "zero": 0}
        found = plan(
            work, n, memory=80e9, batch=batch, network=A100, flops=SPEED,
            precision="fp16", top=1, fixed=fixed,
        )[0]  # fmt: skip
        ratio = 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        done = 96 * batch * 2048 * layers * hidden**2 * ratio  # operations, as they count them
        speed = done / found.seconds / n / 1e12
        offs.append(speed / published - 1)
        how = f"{found.layout.schedule or '-'}, {found.layout.micro_batch}"
        shown = f"{found.seconds:.2f} s | {speed:.0f} T/s | {published} T/s | {offs[-1]:+.0%}"
        print(f"| {billions} billion | {n} | {tp}, {pp} | {how} | {shown} |", flush=True)
    print(f"\nmedian of the differences without their signs: {np.median(np.abs(offs)):.0%}")


def nemo() -> None:
    """Print GPT-3 and Llama 2 on H100; Llamas as GPTs of their sizes, operations counted so."""
    print(f"\nH100 in 8 bits, {SPEED_8_BITS / 1e12:g} T operations/s, nothing computed again\n")
    parts = ("tensor", "bubble", "data")
    head = (
        f"| model | GPUs | tp, pp | step | {' | '.join(parts)} | here | tensor hidden | published |"
    )
    print(f"{head}\n|---|---:|---|{'---:|' * 7}")
    for name, *sizes, tp, pp, n, batch, micro, published in NEMO:
        work = Workload(*sizes)
        fixed = {"tp": tp, "pp": pp, "micro_batch": micro, "recompute": "none", "zero": 1}
        fixed |= {"schedule": "interleaved:2"} if pp > 1 else {}
        found = plan(  # their kernels keep less, so memory does not decide here
            work, n, memory=1e12, batch=batch, network=H100, flops=SPEED_8_BITS, top=1, fixed=fixed,
        )[0]  # fmt: skip
        loss = 2.0 * work.sequence * work.hidden * work.vocabulary
        done = 3 * batch * (work.layers * work.layer_flops() + loss) / n / 1e12
        cells = [f"{found.seconds:.2f} s", *(f"{found.parts[part]:.2f} s" for part in parts)]
        for seconds in (found.seconds, found.seconds - found.parts["tensor"]):
            cells.append(f"{done / seconds:.0f} T/s ({done / seconds / published - 1:+.0%})")
        print(f"| {name} | {n} | {tp}, {pp} | {' | '.join(cells)} | {published} T/s |", flush=True)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, default=310.1, help="billions of parameters (310.1)")
    started = time.perf_counter()
    args = parser.parse_args()
    images()
    megatron(args.most)
    nemo()
    print(f"\n{time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
