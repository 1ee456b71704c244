"""Build of the extension ``pycoll._C``; everything else stands in pyproject.toml."""

import os
import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

SOURCES = sorted(glob("csrc/*.cpp") + glob("csrc/transports/*.cpp"))
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.inl", recursive=True))

# One place for objects, whichever command builds: an editable install compiles nothing twice.
BUILD_TEMP = f"build/objects-{sys.implementation.cache_tag}"


def is_stale(obj: str, src: str) -> bool:
    """Return whether an object file is older than its source, a header, or this file."""
    return os.stat(obj).st_mtime < max(os.stat(p).st_mtime for p in (src, __file__, *HEADERS))


extension = Pybind11Extension(
    "pycoll._C",
    SOURCES,
    depends=[*HEADERS, "setup.py"],
    include_dirs=["csrc"],
    cxx_std=20,
    extra_compile_args=[
        "-O3",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-g0",
    ],
    extra_link_args=["-lpthread", "-lrt"],
)

with ParallelCompile("PYCOLL_BUILD_JOBS", needs_recompile=is_stale):
    setup(ext_modules=[extension], options={"build_ext": {"build_temp": BUILD_TEMP}})
