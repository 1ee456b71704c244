"""Build of the device library ``libpycoll_cuda.so`` by nvcc; `setup.py` calls it.

It takes longer than all the rest, so it is built only where an NVIDIA device is, or where
PYCOLL_CUDA=1 asks for it, which fails where it cannot be made; PYCOLL_CUDA=0 always leaves it out.
NVCC names the compiler, PYCOLL_BUILD_JOBS says how many run at once.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

LIBRARY = "libpycoll_cuda.so"
OBJECTS = "build/cuda"
SHARED_SOURCES = ["csrc/engine/plan.cpp", "csrc/engine/bind.cpp", "csrc/base/types.cpp"]
HOST_SOURCES = [*SHARED_SOURCES, *glob("csrc/cuda/*/*.cpp")]
KERNELS = sorted(glob("csrc/cuda/kernels/units/*.cu"))
# Those that take longest come first.
SOURCES = [*KERNELS, *sorted(glob("csrc/cuda/host/*.cu")), *sorted(HOST_SOURCES)]

# Nothing in the kernels depends on the architecture: one intermediate form, assembled for each, and
# kept for those to come.
TARGETS = ["sm_80", "sm_90", "sm_100", "compute_80"]
# Where the virtual architecture has to be a later one: by the name of the source.
LATER = {"kernels_multicast.cu": ("compute_90", ["sm_90", "sm_100", "compute_90"])}
FLAGS = [
    "-std=c++20",
    "-O3",
    "-Icsrc",
    "-cudart",
    "static",
    "-fmad=false",
    "-Xfatbin=-compress-all",
]
FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall", "-Xptxas", "-v"]


def find_nvcc():
    """Return the path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    candidates = [os.environ.get("NVCC"), "nvcc", os.path.join(home, "bin", "nvcc")]
    return next((path for path in map(shutil.which, filter(None, candidates)) if path), None)


def has_device():
    """Return whether this machine has an NVIDIA device, natively or under WSL."""
    return any(map(os.path.exists, ["/dev/nvidiactl", "/dev/dxg"]))


def release(nvcc):
    """Return the version of a CUDA compiler, such as (13, 0)."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def compile_command(nvcc, source, obj, targets=TARGETS):
    """Return the command that compiles one source."""
    form, targets = LATER.get(os.path.basename(source), ("compute_80", targets))
    listed = ["-MMD", "-MF", list_of(obj)]
    target = ["-gencode", f"arch={form},code=[{','.join(targets)}]"]
    return [nvcc, *FLAGS, *listed, *target, "-c", source, "-o", obj]


def list_of(obj):
    """Return where a compiler lists the files that an object was made of, for ``make``."""
    return os.path.splitext(obj)[0] + ".d"


def made_of(obj):
    """Return the files that an object was made of, or None if nobody knows."""
    try:
        with open(list_of(obj), encoding="utf-8") as file:
            text = file.read().replace("\\\n", " ").split(": ", 1)[1]
    except FileNotFoundError:
        return None
    return [path.replace("\\ ", " ") for path in re.split(r"(?<!\\)\s+", text.strip())]


def is_stale(made, sources):
    """Return whether a file is missing, or older than one of its sources, or one of them missing.

    Args:
        made: The file.
        sources: What it was made of; None if nobody knows.
    """
    if sources is None or not all(map(os.path.exists, [made, *sources])):
        return True
    return os.stat(made).st_mtime < max(os.stat(path).st_mtime for path in sources)


def run(command):
    """Run a compiler, and keep what it says about registers beside what it makes.

    Raises:
        RuntimeError: With what it says, if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    with open(command[-1] + ".log", "w", encoding="utf-8") as log:
        log.write(done.stdout + done.stderr)


def build(folder):
    """Compile what has changed and link the library into a folder, or say why there is none."""
    wanted = os.environ.get("PYCOLL_CUDA", "")
    if wanted == "0" or (wanted != "1" and not has_device()):
        return
    nvcc = find_nvcc()
    try:
        if nvcc is None or release(nvcc) < (12, 8):
            found = "there is no nvcc" if nvcc is None else f"{nvcc} is older than 12.8"
            raise RuntimeError(found)
        compile_and_link(nvcc, folder)
    except RuntimeError as error:
        if wanted == "1":
            raise
        print(f"pycoll is built without its device library: {error}", file=sys.stderr)


def compile_and_link(nvcc, folder):
    """Compile what has changed, several sources at a time, and link."""
    for place in (OBJECTS, folder):
        os.makedirs(place, exist_ok=True)
    objects = [os.path.join(OBJECTS, os.path.basename(source) + ".o") for source in SOURCES]
    stale = [
        compile_command(nvcc, source, obj)
        for source, obj in zip(SOURCES, objects, strict=True)
        if is_stale(obj, made_of(obj)) or is_stale(obj, [__file__])
    ]
    jobs = int(os.environ.get("PYCOLL_BUILD_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, stale))
    library = os.path.join(folder, LIBRARY)
    if is_stale(library, objects):
        linked = os.path.join(OBJECTS, LIBRARY)
        run([nvcc, "-shared", "-cudart", "static", *objects, "-o", linked])
        shutil.copy(linked, library + ".new")
        os.replace(library + ".new", library)  # a running process may have the old one mapped
