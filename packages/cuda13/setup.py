"""Build of the device library as a package of its own, in the sources of pycoll."""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "pycoll" / "config.py").read_text(encoding="utf-8")
VERSION = re.search(r'^VERSION = "(.+)"$', CONFIG, re.MULTILINE)[1]
COMPILE = """
import sys, build_cuda
nvcc = build_cuda.find_nvcc()
if nvcc is None or build_cuda.release(nvcc)[0] != 13:
    sys.exit(f"pycollectives-cuda13 is built by nvcc 13; found: {nvcc}")
build_cuda.build(sys.argv[1])
"""


class BuildPy(build_py):
    """Compiles the library where its sources are, and puts it into the package."""

    def run(self):
        """Build the package and the library in it."""
        super().run()
        folder = os.path.abspath(os.path.join(self.build_lib, "pycoll_cuda13"))
        environment = {**os.environ, "PYCOLL_CUDA": "1"}
        subprocess.run(
            [sys.executable, "-c", COMPILE, folder], cwd=ROOT, env=environment, check=True
        )


class Binary(Distribution):
    """Has machine code, though no extension of Python."""

    def has_ext_modules(self):
        """Return that its files depend on the machine."""
        return True


class BdistWheel(bdist_wheel):
    """One wheel for every Python: ctypes loads the library."""

    def get_tag(self):
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    version=VERSION,
    install_requires=[f"pycollectives=={VERSION}"],
    distclass=Binary,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)
