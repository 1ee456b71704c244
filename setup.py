"""Build of ``pycoll._C`` and of the device library; everything else stands in pyproject.toml.

PYCOLL_ISA=native leaves out the kernels that this processor would not use.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

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

# Bindings are compiled together: alone, each would compile most of pybind11 again. What runs in
# every call is optimized; the rest converts arguments, and compiles faster without.
BINDINGS = {
    "objects": "csrc/bindings",
    "calls": "csrc/bindings/calls",
    "messages": "csrc/bindings/p2p",
}
NATIVE = os.environ.get("PYCOLL_ISA") == "native"


def unit(name: str, sources: list[str]) -> str:
    """Return the path of a source that includes those of a unit; write it if need be."""
    path = f"build/units/{name}.cpp"
    text = "".join(f'#include "{source.removeprefix("csrc/")}"\n' for source in sources)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.exists(path) or Path(path).read_text(encoding="utf-8") != text:
        Path(path).write_text(text, encoding="utf-8")
    return path


def native_kernels() -> str:
    """Return the source of the kernels that this processor would use; isa.cpp chooses alike."""
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    avx2 = {"avx2", "f16c"} <= words
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= words
    chosen = "avx512" if avx512 else "avx2" if avx2 else "base"
    return f"csrc/kernels/isa_{chosen}.cpp"


def units() -> list[str]:
    """Return what is to be compiled: for one processor in few pieces, what takes longest first."""
    found = [unit(name, sorted(glob(f"{folder}/*.cpp"))) for name, folder in BINDINGS.items()]
    others = [path for path in SOURCES if not path.startswith("csrc/bindings/")]
    if not NATIVE:
        return [*found, *others]
    others = [path for path in others if not path.startswith("csrc/kernels/isa_")]
    folders = sorted({path.split("/")[1] for path in others}, reverse=True)
    for name in folders:
        found.append(unit(name, [path for path in others if path.split("/")[1] == name]))
    return [native_kernels(), *found]


def is_stale(obj: str, src: str) -> bool:
    """Return whether an object file is older than what it was made of, or this file."""
    return build_cuda.is_stale(obj, build_cuda.made_of(obj)) or build_cuda.is_stale(obj, [__file__])


# Lets GCC take 0.5 GB, in KiB, before it looks for memory to use again, which costs it time.
MEMORY = ["--param=ggc-min-expand=100", "--param=ggc-min-heapsize=500000"]
if "clang" in os.environ.get("CXX", ""):
    MEMORY = []

extension = Pybind11Extension(
    "pycoll._C",
    units(),
    depends=[*SOURCES, *HEADERS, "setup.py"],
    include_dirs=["csrc"],
    cxx_std=20,
    extra_compile_args=[
        "-O3",
        "-MMD",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        *MEMORY,
        *(["-w"] if NATIVE else ["-Wall", "-Wextra"]),  # of one big unit GCC 12 says nonsense
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

    def build_extensions(self) -> None:
        """Compile each unit with its own options, too."""
        compile_one = self.compiler._compile

        def compile_unit(obj, src, ext, cc_args, options, *rest):
            if src == "build/units/objects.cpp":
                options = [*options, "-O1"]
            compile_one(obj, src, ext, cc_args, options, *rest)

        def compile_in_order(sources, *rest, **options):  # not by name: the longest first
            return compile_all(sorted(sources, key=self.order.index), *rest, **options)

        compile_all = self.compiler.compile
        self.compiler.compile, self.compiler._compile = compile_in_order, compile_unit
        self.order = list(extension.sources)
        super().build_extensions()


with ParallelCompile("PYCOLL_BUILD_JOBS", needs_recompile=is_stale):
    setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExt},
    )
