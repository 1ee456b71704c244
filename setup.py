"""Build of ``pycoll._C`` and of the device library; everything else stands in pyproject.toml."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import build_cuda

FILES = [path for path in glob("csrc/**/*", recursive=True) if not path.startswith("csrc/cuda/")]
SOURCES = sorted(path for path in FILES if path.endswith(".cpp"))
HEADERS = sorted(path for path in FILES if path.endswith((".h", ".inl")))

# One place for objects, whichever command builds: an editable install compiles nothing twice.
BUILD_TEMP = f"build/objects-{sys.implementation.cache_tag}"


def is_stale(obj: str, src: str) -> bool:
    """Return whether an object file is older than what it was made of, or this file."""
    return build_cuda.is_stale(obj, build_cuda.made_of(obj)) or build_cuda.is_stale(obj, [__file__])


extension = Pybind11Extension(
    "pycoll._C",
    SOURCES,
    depends=[*HEADERS, "setup.py"],
    include_dirs=["csrc"],
    cxx_std=20,
    extra_compile_args=[
        "-O3",
        "-MMD",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-Wall",
        "-Wextra",
        "-g0",
    ],
    extra_link_args=["-lpthread", "-lrt"],
)


class BuildExt(build_ext):
    """Builds the device library too, where there is a CUDA compiler."""

    def run(self):
        """Build the extension and the device library beside it, at the same time."""
        self.build_temp = BUILD_TEMP
        folder = os.path.dirname(self.get_ext_fullpath("pycoll._C"))
        with ThreadPoolExecutor(1) as aside:
            library = aside.submit(build_cuda.build, folder)
            super().run()
        library.result()


with ParallelCompile("PYCOLL_BUILD_JOBS", needs_recompile=is_stale):
    setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExt},
    )
