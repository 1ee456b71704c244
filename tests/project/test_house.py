"""The direction of imports, the sizes of folders, and the rules that keep the parts apart."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"errors", "types", "config"}

# What each part may import of pycoll, besides itself. `pycoll` is the package's own front.
ALLOWED = {
    **{word: WORDS for word in WORDS},
    "schedule": WORDS,
    "algorithms": WORDS | {"schedule"},
    "runtime": WORDS | {"schedule", "algorithms", "_C"},
    "observe": WORDS | {"schedule", "algorithms", "runtime", "_C"},
    "cuda": WORDS | {"schedule", "algorithms", "runtime", "_C"},
    "comm": WORDS | {"schedule", "algorithms", "runtime", "observe", "cuda", "_C"},
    "kernels": WORDS | {"runtime", "cuda", "_C"},
    "parallel": WORDS | {"schedule", "algorithms", "comm", "kernels", "pycoll"},
    "torch": WORDS
    | {
        "schedule",
        "algorithms",
        "runtime",
        "observe",
        "cuda",
        "comm",
        "kernels",
        "parallel",
        "_C",
        "pycoll",
    },
    "torch_autoload": {"torch"},
    "cli": WORDS
    | {
        "schedule",
        "algorithms",
        "runtime",
        "observe",
        "cuda",
        "comm",
        "parallel",
        "_C",
        "pycoll",
    },
    "start": WORDS | {"runtime", "cuda", "comm", "_C"},
    "pycoll": WORDS
    | {"schedule", "algorithms", "runtime", "cuda", "comm", "start", "parallel", "_C"},
    "testing": WORDS | {"schedule", "algorithms", "runtime", "comm", "cli", "_C", "pycoll"},
    "__main__": {"cli"},
}
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pycoll").rglob("*.py"))
CXX = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file())
COLLECTIVES = re.compile(
    r"all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|broadcast", re.IGNORECASE
)
OPTIONAL = {"torch", "mpi4py", "cupy", "jax"}
MOST_MODULES = 15
SUFFIXES = {".py", ".cpp", ".h", ".inl", ".cu"}
FOLDERS = sorted({str(Path(path).parent) for path in (*FILES, *CXX)})
CUDA = [path for path in CXX if path.startswith("csrc/cuda/")]
PYTHON_IN_CXX = re.compile(r"pybind11|Python\.h|\bpy::|csrc/bindings|\"bindings/")
CUDA_IN_CXX = re.compile(r"cuda_runtime|<cuda[._/a-z]*>|\bcuda[A-Z]\w+\(")
SIZED = re.compile(r"\bu?int(?:\d+|ptr)_t\b")
INCLUDE = re.compile(r'^#include ([<"])(.+)[>"]', re.MULTILINE)
WITH_SIZED = {"cstdint", "stdint.h", "Python.h", "pybind11/pybind11.h"}
FILES_OF_CXX = sorted(
    str(path.relative_to(ROOT))
    for folder in ("csrc", "tests/native", "tests/cuda", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".h", ".cpp", ".cu")  # an .inl is a part of other files
)
INTRINSICS = re.compile(r"\b_mm\w+")  # some are named after a broadcast within a register


def part_of(module):
    """Return the part of pycoll to which a module belongs: "pycoll.comm.x" -> "comm"."""
    return module.split(".")[1] if "." in module else "pycoll"


def module_of(path):
    """Return the dotted name of a file: "pycoll/comm/communicator.py" -> "pycoll.comm"."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(text, module, is_package):
    """Return the absolute names of all modules that a Python text may import."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            # `from pycoll import x` imports a part when x is one, else the front
            names = {f"{base}.{a.name}" for a in node.names} if base == "pycoll" else {base}
            found |= names
    return found


def forbidden_imports(text, path):
    """Return the imports of a file of pycoll that go against the direction."""
    module = module_of(path)
    part = part_of(module)
    if part not in ALLOWED:
        return [f"{part} is a new part: say in ALLOWED what it may import"]
    names = imported_modules(text, module, path.endswith("__init__.py"))
    own = {name for name in names if name.split(".")[0] == "pycoll"}
    parts = {name: part_of(name) for name in own}
    parts = {n: p if p in ALLOWED or p == "_C" else "pycoll" for n, p in parts.items()}
    bad = {name for name, other in parts.items() if other not in ALLOWED[part] | {part}}
    foreign = {name for name in names if name.split(".")[0] == "torch" and part != "torch"}
    return sorted(bad | foreign)


def imported_files(text, module, is_package, modules):
    """Return the modules among the given ones whose files a Python text imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= (names & modules) | ({base} if names - modules - {"pycoll._C"} else set())
    return (found & modules) - {module}


def circles(imports):
    """Return the groups of names that reach each other; `imports` maps names to sets of names."""
    reached = {}
    for name in imports:
        seen, left = set(), [name]
        while left:
            new = imports.get(left.pop(), set()) - seen
            seen |= new
            left.extend(new)
        reached[name] = seen
    groups = {
        frozenset(other for other in seen if name in reached.get(other, ()))
        for name, seen in reached.items()
        if name in seen
    }
    return sorted(sorted(group) for group in groups)


def environment_reads(text):
    """Return the lines on which a Python text reaches for the environment of the process."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    )


def unasked_imports(text):
    """Return the packages of OPTIONAL that a test imports before it has asked for any."""
    found = []
    for statement in ast.parse(text).body:
        if "importorskip" in ast.unparse(statement):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found += imported_modules(ast.unparse(statement), "tests", False)
    return sorted(name for name in found if name.split(".")[0] in OPTIONAL)


def headers_of(path, seen):
    """Return the names in angle brackets that a file includes, also by way of files of ours."""
    found = set()
    seen.add(path)
    for bracket, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        roots = (path.parent, ROOT / "csrc", ROOT / "tests/native")
        ours = [at / name for at in roots if (at / name).is_file()]
        if bracket == "<":
            found.add(name)
        elif ours and ours[0].resolve() not in seen:
            found |= headers_of(ours[0].resolve(), seen)
    return found


@pytest.mark.parametrize("path", FILES)
def test_imports_go_one_way(path):
    assert forbidden_imports((ROOT / path).read_text(encoding="utf-8"), path) == []


def test_no_file_imports_itself_by_way_of_others():
    """Imports for types only count: what two files need of each other lies below both."""
    paths = {module_of(path): path for path in FILES}
    graph = {
        module: imported_files(
            (ROOT / path).read_text(encoding="utf-8"),
            module,
            path.endswith("__init__.py"),
            paths.keys(),
        )
        for module, path in paths.items()
    }
    assert circles(graph) == []
    assert graph["pycoll.start"] & paths.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_can_be_walked(folder):
    """A module is a Python file, or a C++ source with its header."""
    modules = {path.stem for path in (ROOT / folder).iterdir() if path.suffix in SUFFIXES}
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("path", FILES)
def test_no_hidden_state(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert [n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Global)] == []
    if path != "pycoll/config.py":
        assert environment_reads(text) == []


def test_a_test_asks_for_a_package_that_may_be_missing_before_it_imports_it():
    """Else the whole run ends where the package is missing, in place of one skipped file."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        assert unasked_imports(path.read_text(encoding="utf-8")) == [], path
    assert unasked_imports("import os, torch.nn\nfrom mpi4py import MPI") == ["mpi4py", "torch.nn"]
    assert unasked_imports("torch = pytest.importorskip('torch')\nimport torch.nn") == []


@pytest.mark.parametrize("path", CXX)
def test_the_engine_names_no_collective(path):
    text = INTRINSICS.sub("", (ROOT / path).read_text(encoding="utf-8"))
    named = [i for i, line in enumerate(text.splitlines(), 1) if COLLECTIVES.search(line)]
    assert named == []


@pytest.mark.parametrize("path", CUDA)
def test_the_device_library_knows_no_python_and_few_files_the_runtime(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert PYTHON_IN_CXX.findall(text) == []
    if not path.startswith("csrc/cuda/host/") or not path.endswith((".cu", "cuda_calls.h")):
        assert CUDA_IN_CXX.findall(text) == []


@pytest.mark.parametrize("path", FILES_OF_CXX)
def test_sized_integers_come_from_their_header(path):
    """Other standard headers bring them in some versions of a compiler only."""
    if SIZED.search((ROOT / path).read_text(encoding="utf-8")):
        assert headers_of(ROOT / path, set()) & WITH_SIZED


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [
        ["a", "b", "c"]
    ]
    text = "if TYPE_CHECKING:\n    from pycoll.comm import Communicator\nfrom . import other"
    modules = {"pycoll.comm", "pycoll.x.other", "pycoll.x"}
    assert imported_files(text, "pycoll.x.me", False, modules) == {"pycoll.comm", "pycoll.x.other"}


def test_the_sources_are_found():
    assert "csrc/base/fork_guard.h" in FILES_OF_CXX
    assert "pycoll/config.py" in FILES
    assert "csrc/kernels/fold/fold.cpp" in CXX
    assert "csrc/cuda/kernels/interpreter.h" in CUDA


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("pycoll/schedule/x.py", "import pycoll._C", ["pycoll._C"]),
        ("pycoll/schedule/x.py", "from pycoll import _C", ["pycoll._C"]),
        ("pycoll/schedule/x.py", "from .. import comm", ["pycoll.comm"]),
        ("pycoll/schedule/__init__.py", "from ..algorithms import ring", ["pycoll.algorithms"]),
        ("pycoll/schedule/x.py", "def f():\n    import pycoll", ["pycoll"]),
        ("pycoll/schedule/x.py", "from pycoll import init", ["pycoll.init"]),
        (
            "pycoll/parallel/x.py",
            "from pycoll.runtime.calls.plans import p",
            ["pycoll.runtime.calls.plans"],
        ),
        ("pycoll/cli/x.py", "import torch.nn", ["torch.nn"]),
        ("pycoll/comm/communicator.py", "from pycoll.parallel import ddp", ["pycoll.parallel"]),
        ("pycoll/errors.py", "from pycoll.schedule import ir", ["pycoll.schedule"]),
        ("pycoll/schedule/x.py", "from pycoll.schedule.ir import at; from .ir import fold", []),
        ("pycoll/algorithms/x.py", "from ..schedule import ir; from ..errors import E", []),
        ("pycoll/cli/x.py", "import pycoll; from pycoll import init, _C; import numpy", []),
        ("pycoll/__init__.py", "from .comm import Communicator; from . import errors", []),
    ],
)
def test_a_wrong_import_is_seen(path, text, expected):
    assert forbidden_imports(text, path) == expected


def test_other_breaches_are_seen():
    text = "import os\nos.environ['A']\nfrom os import getenv\nos.putenv('A', 'b')"
    assert environment_reads(text) == [2, 3, 4]
    assert COLLECTIVES.search("void AllReduce();")
    assert PYTHON_IN_CXX.search("#include <pybind11/pybind11.h>")
    assert CUDA_IN_CXX.search("cudaMalloc(&p, 1)")
    assert not CUDA_IN_CXX.search("pycoll_cuda_malloc(0, 1, &p)")
    assert not COLLECTIVES.search(INTRINSICS.sub("", "_mm512_broadcast_f32x4(x)"))
