"""The device library as tests use it, and worlds of ranks on the one that is built for the host."""

import ctypes
import subprocess
from ctypes import byref, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from pycoll.cuda.device.library import Message, Norm
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.lowering.compile import peer_plans
from pycoll.types import DType, ReduceOp

ROOT = Path(__file__).resolve().parents[2]
OK, UNAVAILABLE, ARGUMENT, SCHEDULE, TOO_LARGE, RUNTIME = range(6)
TIMEOUT, ABORTED, MISMATCH, FOLLOWED = 1, 2, 3, 4
BEST, INTERPRET, DIRECT, LOW_LATENCY = range(4)
LANES = 32  # threads for one lane of the host library
_SPEC = "ninstructions noperands rank chunks slots rounds direct dtype op itemsize in_layout"


def _structure(name, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Error = _structure(
    "Error",
    **dict.fromkeys("kind rank peer block step expected seen instruction".split(), c_uint32),
    waited_ns=c_uint64,
    reserved=c_uint64,
)
Spec = _structure(
    "Spec",
    code=c_void_p,
    operands=c_void_p,
    **dict.fromkeys(f"{_SPEC} out_layout scale_n scale_at_exit".split(), c_uint32),
    **dict.fromkeys("count chunk descriptor".split(), c_uint64),
    **dict.fromkeys("in_offset in_length out_offset out_length".split(), c_void_p),
)
Info = _structure(
    "Info",
    kernel=ctypes.c_char * 64,
    **dict.fromkeys("max_blocks blocks threads registers local_bytes shared_bytes".split(), c_int),
    segments=c_uint64,
    in_bytes=c_uint64 * 64,
    out_bytes=c_uint64 * 64,
)
Program = _structure(
    "Program", code=c_void_p, operands=c_void_p, ninstructions=c_uint32, noperands=c_uint32
)


class DeviceError(Exception):
    """A function of the library has failed; ``status`` is its result."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Library:
    """``pycoll_cuda_*`` by name; a result that is not OK becomes a `DeviceError`."""

    def __init__(self, path):
        self.dll = ctypes.CDLL(str(path))
        self.dll.pycoll_cuda_last_error.restype = c_char_p

    def __getattr__(self, name):
        function = getattr(self.dll, f"pycoll_cuda_{name}")

        def call(*arguments):
            status = function(*arguments)
            if status != OK:
                raise DeviceError(status, self.dll.pycoll_cuda_last_error().decode())

        return call

    def schedule(self, seed):
        """Run lanes as fibers under a scheduler with this seed; negative: as threads."""
        self.dll.pycoll_host_schedule(c_int64(seed))


def host_library(mode="plain"):
    """Build the library for the host and return its path."""
    script = ["bash", str(ROOT / "tests/cuda/host/build.sh"), mode]
    built = subprocess.run(script, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ROOT / built.stdout.strip()


def parts_of(library, n, nbytes, slotted):
    """Return how many parts a message has."""
    function = library.dll.pycoll_cuda_message_parts
    function.restype = c_uint64
    return function(n, c_uint64(nbytes), int(slotted))


def norm_of(ins, weight, residual, outs, kept, *, tree=True, push=False, eps=1e-6):
    """Return a call of RMSNorm over rows ``[rows, hidden]`` of all ranks."""
    some = [None if arrays is None else pointers(arrays) for arrays in (ins, residual, outs, kept)]
    filled = [ctypes.cast(array, ctypes.POINTER(c_void_p)) for array in some]
    dtype = DType[ins[0].dtype.name.upper()]
    return Norm(*filled, weight.ctypes.data, *ins[0].shape, eps, dtype, tree, push)


def pointers(arrays):
    """Return the addresses of arrays as a C array of pointers."""
    return (c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))


def chunk_of(promise, count, chunks, itemsize):
    """Elements of a chunk, as the engine for the processor cuts them."""
    share = -(-count // chunks)
    if OWN in (promise.in_layout, promise.out_layout) or promise.transposes:
        return share
    line = max(1, 64 // itemsize)
    return -(-share // line) * line


def spec_of(plan, dtype, op="sum", count=0, chunk=None, descriptor=7):
    """Return the numbers of a call for one rank's plan."""
    promise, chunks = COLLECTIVES[plan.schedule.collective], max(1, plan.schedule.chunks)
    kind = np.dtype(dtype)
    average = op == "avg" and promise.reduces
    spec = Spec(
        code=plan.code.ctypes.data,
        operands=plan.operands.ctypes.data,
        ninstructions=len(plan.code),
        noperands=len(plan.operands),
        rank=plan.rank,
        chunks=chunks,
        slots=plan.slots,
        rounds=plan.rounds,
        direct=plan.direct,
        dtype=DType[kind.name.upper()],
        op=ReduceOp[op.upper()],
        itemsize=kind.itemsize,
        in_layout=promise.in_layout == OWN,
        out_layout=promise.out_layout == OWN,
        scale_n=plan.schedule.n if average else 0,
        scale_at_exit=average and not plan.scales_in_fold,
        count=count,
        chunk=chunk_of(promise, count, chunks, kind.itemsize) if chunk is None else chunk,
        descriptor=descriptor,
    )
    spec.plan = plan  # its arrays live as long
    return spec


class World:
    """Ranks of the host library: virtual ones, or peers that tell each other their arrays.

    Args:
        library: A `Library` for the host.
        n: How many ranks.
        peers: One group for each rank, as between processes, instead of one for all.
        max_blocks: Blocks of a rank at most.
        cell_bytes: Scratch memory of each rank, for each of two segments.
    """

    def __init__(self, library, n, *, peers=False, max_blocks=8, cell_bytes=1 << 16):
        self.library, self.n, self.peers = library, n, peers
        self.groups, self.calls = [], []
        for rank in range(n if peers else 1):
            group = c_void_p()
            if peers:
                library.group_peer(0, rank, n, max_blocks, c_uint64(99), byref(group))
            else:
                library.group_virtual(0, n, max_blocks, byref(group))
            self.groups.append(group)
        whole = np.zeros(n * 2 * cell_bytes + 16, np.uint8)
        first = -whole.ctypes.data % 16
        self.cells = whole[first : first + n * 2 * cell_bytes].reshape(n, 2 * cell_bytes)
        self.connect(cell_bytes)

    def connect(self, cell_bytes):
        controls = None
        if self.peers:
            controls = (c_void_p * self.n)()
            for rank, group in enumerate(self.groups):
                control = c_void_p()
                self.library.group_control(group, byref(control))
                controls[rank] = control
        heaps = (c_void_p * self.n)(*[1] * self.n) if self.peers else None  # all memory there is
        cells = pointers(self.cells) if cell_bytes else None
        everything = c_uint64((1 << 63) - 1)
        for group in self.groups:
            self.library.group_connect(
                group, controls, heaps, everything, cells, c_uint64(cell_bytes)
            )

    def call(self, specs):
        """Return handles of a call, one for each group.

        Args:
            specs: One for each rank; or, of peers, what each of them gives.
        """
        handles = []
        for i, group in enumerate(self.groups):
            given = specs[i] if isinstance(specs[i], list) else specs
            mine = (Spec * len(given))(*given)
            handle = c_void_p()
            self.library.call_create(group, mine, len(mine), byref(handle))
            handles.append(handle)
        self.calls += handles
        return handles

    def launch(
        self, handles, ins, outs, *, blocks=2, lanes=2, method=BEST, timeout_ms=1000, absent=0
    ):
        """Queue a call on all ranks; `synchronize` runs it."""
        for i, handle in enumerate(handles):
            a, b = (ins[i : i + 1], outs[i : i + 1]) if self.peers else (ins, outs)
            self.library.launch(
                handle,
                pointers(a),
                pointers(b),
                blocks,
                lanes * LANES,
                method,
                c_uint64(timeout_ms * 1_000_000),
                c_uint64(absent),
                c_void_p(i + 1),
            )

    def message(
        self,
        side,
        rank,
        peer,
        number,
        x,
        *,
        slotted,
        stream=1,
        blocks=2,
        lanes=2,
        timeout_ms=1000,
        source=None,
        posts=True,
        awaits=False,
    ):
        """Queue one side of a message, ``"send"`` or ``"receive"``, on stream 1 to 9 of a rank.

        `number` is that of the first part; `source` is what is sent, if it is not slotted, for the
        receiver to read.
        """
        offset = 0 if source is None else source.ctypes.data - 1  # heaps begin at 1
        ends = number, x.nbytes, x.ctypes.data, offset, peer, slotted, posts, awaits
        limit, where = c_uint64(timeout_ms * 1_000_000), c_void_p(10 * (rank + 1) + stream)
        form = blocks, lanes * LANES, limit, where
        getattr(self.library, side)(self.groups[rank], byref(Message(*ends)), *form)

    def taken(self, rank, peer, number, x, slotted):
        """Return whether a message was taken."""
        found, ends = c_int(), (number, x.nbytes, x.ctypes.data, 0, peer, slotted)
        self.library.message_taken(self.groups[rank], byref(Message(*ends)), byref(found))
        return bool(found.value)

    def parts(self, nbytes, slotted):
        """Return how many parts a message has."""
        return parts_of(self.library, self.n, nbytes, slotted)

    def rms_norm(self, norm, *, blocks=2, lanes=2, timeout_ms=1000, absent=0):
        """Queue a `pycoll.cuda.device.library.Norm` on all virtual ranks."""
        limits = c_uint64(timeout_ms * 1_000_000), c_uint64(absent), c_void_p(1)
        self.library.rms_norm(self.groups[0], byref(norm), blocks, lanes * LANES, *limits)

    def synchronize(self):
        self.library.synchronize(None)

    def error(self, rank):
        """Return the record of a rank."""
        error = Error()
        self.library.group_error(self.groups[rank if self.peers else 0], rank, byref(error))
        return error

    def failed(self):
        """Return the ranks that have a record."""
        return [rank for rank in range(self.n) if self.error(rank).kind != 0]

    def info(self, handle, method=BEST):
        info = Info()
        self.library.call_info(handle, method, byref(info))
        return info

    def each(self, name, *arguments):
        """Call a function on every group."""
        for group in self.groups:
            getattr(self.library, name)(group, *arguments)

    def close(self):
        for handle in self.calls:
            self.library.call_destroy(handle)
        self.each("group_destroy")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def plans_of(entry, n, *, direct=True, in_place=False, **params):
    """Return the plans of all ranks."""
    return peer_plans(entry.schedule(n, **params), direct=direct, in_place=direct and in_place)
