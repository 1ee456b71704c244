"""The trainers whose tests are run: packages, where the tests are from, and which of them."""

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]


@dataclass
class Run:
    """Tests of pytest, or one program that passes if it exits with 0."""

    label: str
    words: list[str]
    program: bool = False
    env: dict[str, str] = field(default_factory=dict)
    folder: str = "."
    limit_s: float = 1800


@dataclass
class Trainer:
    """A trainer of PyTorch; ``sdist`` or ``checkout`` has its tests, if the wheel has not."""

    name: str
    version_of: str
    packages: list[str]
    runs: list[Run]
    sdist: str | None = None
    checkout: str | None = None
    prepare: list[str] = field(default_factory=list)  # for its Python, once after installing


def pytest_run(label, *words, each_s=120, **more):
    """Return a run of pytest with a limit for each test."""
    return Run(label, ["-m", "pytest", "-q", f"--timeout={each_s}", *words], **more)


def scripts(*names):
    """Return a run under torchrun for each of Accelerate's test scripts."""
    module = "accelerate.test_utils.scripts."
    env = {"ACCELERATE_USE_CPU": "true"}
    return [Run(n, [*TORCHRUN, "-m", module + n], True, env, limit_s=300) for n in names]


IGNITE_PARTS = ["distributed", "engine", "handlers", "metrics", "base"]
IGNITE = Trainer(
    "ignite",
    "pytorch-ignite",
    ["pytorch-ignite==0.5.5", "scikit-learn", "torchvision", "tqdm", "scipy", "pandas"],
    [
        pytest_run("tests that start their ranks", "tests/ignite/distributed", each_s=300),
        pytest_run(
            "tests marked distributed, 2 ranks",
            *["--dist=each", "--tx=2*popen", "-m", "distributed", "--max-worker-restart=0"],
            *[f"tests/ignite/{part}" for part in IGNITE_PARTS],
            env={"WORLD_SIZE": "2"},
        ),
    ],
    sdist="pytorch-ignite==0.5.5",
)

ACCELERATE = Trainer(
    "accelerate",
    "accelerate",
    [
        *["accelerate==1.15.0", "transformers", "datasets", "evaluate", "parameterized"],
        *["scikit-learn", "scipy", "torchdata", "tqdm"],
    ],
    [
        pytest_run(
            "its test files of CPUs",
            *[f"tests/test_{part}.py" for part in ("cpu", "grad_sync", "optimizer", "scheduler")],
            "tests/test_metrics.py",
        ),
        *scripts("test_script", "test_sync", "test_ops", "external_deps.test_metrics"),
        # These ask for GPUs: test_distributed_data_loop, test_ddp_comm_hook, test_merge_weights.
        # These load models of the hub: external_deps.test_checkpointing, .test_performance.
    ],
    sdist="accelerate==1.15.0",
)

DEEPSPEED_ENV = {
    **{"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "DS_DISABLE_REUSE_DIST_ENV": "1"},
    **{"DS_UNITTEST_TIMEOUT": "600", "DS_SKIP_CUDA_CHECK": "1"},
}
OPERATORS = """
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
for builder in (CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder):
    builder().load()
"""
ZERO, FRAGMENTS = "tests/unit/runtime/zero", "tests/unit/runtime/zero/test_zero_tensor_fragment.py"
DEEPSPEED_PARTS = {
    "unit/comm": ["tests/unit/comm"],
    "unit/runtime/zero, tensor fragments apart": [ZERO, f"--ignore={FRAGMENTS}"],
    "unit/runtime/zero, tensor fragments": [FRAGMENTS],
}
DEEPSPEED = Trainer(
    "deepspeed",
    "deepspeed",
    [
        *["deepspeed==0.19.5", "setuptools<82", "ninja", "transformers", "tabulate"],
        *["accelerate", "pytest<8.4"],
    ],
    [
        pytest_run(label, "-p", "imported_before_fork", *words, each_s=900, env=DEEPSPEED_ENV)
        for label, words in DEEPSPEED_PARTS.items()
    ],
    checkout="DeepSpeed-0.19.5",
    prepare=["-c", OPERATORS],
)

LIGHTNING_PARTS = [
    *["strategies/test_ddp.py", "strategies/test_ddp_integration.py"],
    *["trainer/logging_/test_distributed_logging.py", "utilities/test_all_gather_grad.py"],
    *["overrides/test_distributed.py", "models/test_ddp_fork_amp.py"],
]
FABRIC_PARTS = [
    *["plugins/collectives", "strategies/test_ddp.py", "strategies/test_ddp_integration.py"],
    *["strategies/launchers", "utilities/test_distributed.py"],
]
LIGHTNING = Trainer(
    "lightning",
    "lightning",
    [
        *["lightning==2.6.5", "scikit-learn", "cloudpickle", "psutil", "tensorboard", "pandas"],
        *[
            "tensorboardX",
            "jsonargparse[signatures]",
            "pytest-rerunfailures",
            "pytest-random-order",
        ],
    ],
    [
        pytest_run("Fabric", *FABRIC_PARTS, folder="tests/tests_fabric"),
        pytest_run("Trainer", *LIGHTNING_PARTS, folder="tests/tests_pytorch"),
    ],
    checkout="pytorch-lightning-2.6.5",
)

TITAN = [
    *["--job.config_file", "torchtitan/models/llama3/train_configs/debug_model.toml"],
    *["--training.steps", "4", "--training.seq_len", "128", "--training.local_batch_size", "2"],
]
TITAN_RUNS = {
    "llama3 debug model, FSDP2": [],
    "llama3 debug model, tensor parallel": ["--parallelism.tensor_parallel_degree", "2"],
}
TORCHTITAN = Trainer(  # 0.3 takes its attention from FlexAttention, which trains on GPUs only
    "torchtitan",
    "torchtitan",
    ["torchtitan==0.2.2", "triton"],
    [
        Run(label, [*TORCHRUN, HERE / "titan_on_cpus.py", *TITAN, *more], True, limit_s=600)
        for label, more in TITAN_RUNS.items()
    ],
    checkout="torchtitan-0.2.2",
)

RAY_ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
RAY = Trainer(
    "ray",
    "ray",
    ["ray[train]==2.60.0"],
    [Run("TorchTrainer of two workers", [HERE / "ray_steps.py"], True, RAY_ENV, limit_s=600)],
)

TORCHFT = Trainer(
    "torchft",
    "torchft-nightly",
    ["torchft-nightly==2026.10.26", "parameterized", "expecttest"],
    [
        Run("a lighthouse, one of two replica groups killed", [HERE / "torchft_steps.py"], True),
        *[
            pytest_run(
                f"its {part} tests",
                *["-p", "in_place_in_torchft", "--pyargs", f"torchft.{part}_test"],
                env={"PYTHONHASHSEED": "0"},  # names of tests have the order of a set
            )
            for part in ("manager_integ", "process_group", "local_sgd_integ")
        ],
    ],
)

TRAINERS = {t.name: t for t in (IGNITE, ACCELERATE, DEEPSPEED, LIGHTNING, TORCHTITAN, RAY, TORCHFT)}
