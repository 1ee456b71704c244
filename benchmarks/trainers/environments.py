"""What the tests of a trainer are run in: an environment of its own, and its sources."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
BASE = ["torch==2.13.0", "numpy", "pytest", "pytest-timeout", "pytest-xdist"]
HERE = "in_place_of_gloo:register"


def python_of(folder, trainer):
    """Return the Python of a trainer's environment, and make it if it is not there."""
    place = folder / "venv" / trainer.name
    python = place / "bin" / "python"
    done = place / "installed"
    wanted = "\n".join([*BASE, *trainer.packages])
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        command = [python, "-m", "pip", "install", "-q", *BASE, *trainer.packages]
        subprocess.run(command, check=True)
        if trainer.prepare:
            env = {**os.environ, **operators(folder), "PATH": f"{place}/bin:{os.environ['PATH']}"}
            subprocess.run([python, *trainer.prepare], check=True, env=env)
        done.write_text(wanted)
    show_pycoll(folder, place)
    return python


def show_pycoll(folder, place):
    """Let an environment find pycoll, and PyTorch its entry points, as where it is installed.

    A file of paths does it, because tests of launchers set ``PYTHONPATH`` for some of their ranks;
    see `in_place_of_gloo`.
    """
    named = folder / "named" / "named-1.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 1\n")
    (named / "entry_points.txt").write_text(
        f"[torch.backends]\ncounted = {HERE}\npycoll = pycoll.torch_autoload:register\n"
    )
    paths = named.parent, Path(__file__).parent, TREE
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "pycoll.pth").write_text("\n".join(map(str, paths)))


def operators(folder):
    """Return the variable that says where PyTorch puts what it compiles on first use."""
    return {"TORCH_EXTENSIONS_DIR": str(folder / "operators")}


def sources_of(folder, sources, trainer):
    """Return the folder of a trainer's sources: from PyPI, or a checkout in ``sources``."""
    if trainer.sdist is None:
        return folder if trainer.checkout is None else sources / trainer.checkout
    name = trainer.sdist.replace("==", "-").replace("-", "_", trainer.sdist.count("-"))
    place = folder / "src" / name
    if not place.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
        ]
        subprocess.run([*command, "-d", folder / "src", trainer.sdist], check=True)
        with tarfile.open(next((folder / "src").glob(f"{name}*.tar.gz"))) as archive:
            archive.extractall(folder / "src", filter="data")
    return place


def variables(folder, backend, made):
    """Return the variables of the environment for a run on a backend."""
    return {
        **operators(folder),
        "IN_PLACE_OF_GLOO": "" if backend == "gloo" else backend,
        "GROUPS_MADE": str(made),
        "BACKEND_NAME": backend,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
