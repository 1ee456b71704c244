"""PyTorch's own tests of backends, those that its ``test_distributed_spawn.py`` runs.

``python benchmarks/torch_c10d_suite.py pycoll 2 [NAME ...]`` runs the tests whose names hold a
NAME on two ranks, and says how many pass; ``gloo`` instead of ``pycoll`` is what to compare with.
Needs ``pip install expecttest``. The tests come with PyTorch. Many ask whether the backend is gloo;
to them pycoll says yes, because they check nothing that is gloo's alone.
"""

import logging
import os
import sys
import tempfile
import unittest
from collections import Counter
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
WHERE = 'BACKEND = os.environ["BACKEND"]'


class Name(str):
    """The name of a backend that is taken for gloo."""

    def __eq__(self, other):
        return other in ("gloo", str(self))

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


def load(backend):
    """Return PyTorch's module of tests, for a backend."""
    from torch.testing._internal.common_distributed import DistTestCases

    DistTestCases.backend_feature["plugin"].add(backend)
    spec = find_spec(SUITE)
    text = Path(spec.origin).read_text(encoding="utf-8")
    assert text.count(WHERE) == 1
    module = module_from_spec(ModuleSpec(SUITE, None, origin=spec.origin))
    module.__file__, module.BACKEND = spec.origin, backend if backend == "gloo" else Name(backend)
    sys.modules[SUITE] = module
    exec(compile(text.replace(WHERE, ""), spec.origin, "exec"), vars(module))
    return module


def suite(module):
    """Return the tests, each of which forks its ranks."""
    from torch import multiprocessing

    process = multiprocessing.get_context("fork").Process

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(process)

    return Suite


def run(cls, name):
    """Run a test; return how it ended, and why."""
    result = unittest.TestResult()
    cls(name).run(result)
    if bad := result.failures + result.errors:
        return "fails", bad[0][1].strip().splitlines()[-1]
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passes", "")


def main():
    """Run the tests that the command line names."""
    backend, ranks, *wanted = sys.argv[1:]
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND=backend, WORLD_SIZE=ranks, OMP_NUM_THREADS="1", TEMP_DIR=folder)
    Path(folder, "barrier").touch()
    import torch

    import pycoll.torch  # noqa: F401 - registers the backend

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    cls, counts = suite(load(backend)), Counter()
    for name in unittest.defaultTestLoader.getTestCaseNames(cls):
        if not wanted or any(word in name for word in wanted):
            how, why = run(cls, name)
            counts[how] += 1
            print(how.ljust(8), name, why[:200], flush=True)
    print(", ".join(f"{count} {how}" for how, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
