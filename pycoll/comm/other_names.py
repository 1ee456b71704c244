"""What users of MPI, PyTorch, Horovod, JAX and CuPy write, and what it is here: for errors."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, NoReturn

from pycoll.runtime.calls.other_arguments import LATER, explained
from pycoll.runtime.calls.work import Work

_NAMES = {  # without capitals and underscores; other spellings of our own names need no line
    "size": "world_size",
    "getsize": "world_size",
    "getworldsize": "world_size",
    "getrank": "rank",
    "axisindex": "rank",
    "processindex": "rank",
    "axissize": "world_size",
    "processcount": "world_size",
    "bcast": "broadcast",
    "allgatherintotensor": "all_gather",
    "reducescattertensor": "reduce_scatter",
    "reducescatterblock": "reduce_scatter",
    "alltoallsingle": "all_to_all",
    "broadcastobjectlist": "broadcast_object",
    "scatterobjectlist": "scatter_object",
    "sendobjectlist": "send_object",
    "recvobjectlist": "recv_object",
    "sendrecvreplace": "sendrecv(x, dst, x, src)",
    "splittype": "split(comm.hosts[comm.rank])",
    "getlocalrank": "local_rank",
    "localsize": "hosts.count(comm.hosts[comm.rank])",
    "localworldsize": "hosts.count(comm.hosts[comm.rank])",
    "ppermute": "sendrecv",
    "psum": "all_reduce",
    "pmean": 'all_reduce(x, "avg")',
    "pmax": 'all_reduce(x, "max")',
    "pmin": 'all_reduce(x, "min")',
    "sum": "all_reduce",
    "mean": 'all_reduce(x, "avg")',
    "max": 'all_reduce(x, "max")',
    "min": 'all_reduce(x, "min")',
    "psumscatter": "reduce_scatter",
    "processallgather": "all_gather(x[None])",
    "broadcastonetoall": "broadcast",
    "syncglobaldevices": "barrier()",
    "groupedallreduce": "all_reduce",
    "ssend": "send",
    "createcart": "grid",
    "neighborallgather": "grid(shape).neighbor_all_gather",
    "neighboralltoall": "grid(shape).neighbor_all_to_all",
    "getcoords": "coords_of",
    "getcartrank": "rank_at",
    "newgroup": "split",
    "creategroup": "split",
    "clone": "dup",
    "free": "close",
    "disconnect": "close",
    "shutdown": "close",
    "destroyprocessgroup": "close",
    "rankid": "rank",
    "monitoredbarrier": "barrier",
    "batchisendirecv": "isend and irecv, and pycoll.wait_all",
    "win": "window",
    "timeout": "timeout= of pycoll.init and of each call, or PYCOLL_TIMEOUT",
    "settimeout": "timeout= of pycoll.init and of each call, or PYCOLL_TIMEOUT",
}
_OF_WORK = {
    **{"test": "done()", "is_completed": "done()", "is_done": "done()"},
    **{"result": "wait()", "get": "wait()", "synchronize": "wait()"},
}
_CONSTANTS = {  # and functions of modules
    **{"SUM": 'op="sum"', "PROD": 'op="prod"', "MIN": 'op="min"', "MAX": 'op="max"'},
    **{"LAND": 'op="and", on bools', "LOR": 'op="or", on bools', "BAND": 'op="and"'},
    **{"BOR": 'op="or"', "BXOR": 'op="xor"', "MINLOC": "comm.minloc", "MAXLOC": "comm.maxloc"},
    "ReduceOp": 'a name, such as op="sum"',
    **{"ANY_SOURCE": "pycoll.ANY", "ANY_TAG": "pycoll.ANY"},
    "PROC_NULL": "None, as dst or src of comm.sendrecv",
    "IN_PLACE": "comm.all_reduce(x, out=x)",
    **{"Waitall": "pycoll.wait_all", "Waitany": "pycoll.wait_any"},
    "Wtime": "time.perf_counter",
    "UNDEFINED": "None, as the color of comm.split",
    "Compute_dims": "comm.grid((0, 0)), whose shape is chosen",
    "Status": "what comm.probe returns",
    "Request": "the Work that comm.isend returns",
    "COMM_SELF": "comm.split(comm.rank)",
    "Finalize": "comm.close()",
    **{"Average": 'op="avg"', "AVG": 'op="avg"', "Product": 'op="prod"'},
    "Get_processor_name": "socket.gethostname()",
    "P2POp": "comm.isend or comm.irecv, and pycoll.wait_all",
    **dict.fromkeys(("group_start", "groupStart"), "comm.isend, comm.irecv and pycoll.wait_all"),
    "DistributedOptimizer": "pycoll.parallel, or DistributedDataParallel over pycoll.torch",
}
_MADE_BY_INIT = (  # of which the communicator of all ranks takes the place
    *("COMM_WORLD", "MPI", "Init", "init_process_group", "is_initialized", "get_unique_id"),
    *("UniqueId", "NCCLBackend", "NcclCommunicator"),
)


class NamesFromElsewhere:
    """What says of a name that is not known here what it is called."""

    if not TYPE_CHECKING:  # to which every name would be known then

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError."""
            kind = type(self)
            known = name.startswith("_") or hasattr(kind, name)  # then what raised is inside of it
            here = "" if known else name_here(name, kind)
            text = f"{kind.__name__!r} object has no attribute {name!r}"
            if here:  # then Python has nothing to add
                raise AttributeError(f"{text}; here it is {here}", obj=self)
            raise AttributeError(text, name=name, obj=self)


def explain(error: BaseException) -> None:
    """Add to the text of an error that comes from such a habit what the thing is called here."""
    if isinstance(error, TypeError):
        if (text := explained(str(error))) != str(error):
            error.args = (text,)
    elif isinstance(error, AttributeError) and isinstance(error.obj, Work):
        if here := _OF_WORK.get((error.name or "").lower()):
            error.args = (f"{error}; here it is {here}",)
    elif isinstance(error, ImportError) and error.name == "pycoll":
        if said := re.match(r"cannot import name '(\w+)' from 'pycoll'", error.msg):
            error.msg += of_module(said[1], sys.modules["pycoll"].Communicator)
    elif isinstance(error, ValueError) and "using env:// rendezvous" in str(error):
        error.args = (f"{error}; torchrun sets it, or `pycoll run` with --hosts",)


def name_here(name: str, kind: type) -> str:
    """Return what is called that elsewhere, for one of our classes; empty if nothing is."""
    if name == "Abort" and hasattr(kind, "abort"):
        return "abort, after which calls raise; to end the job, raise an exception"
    ours = [known for known in dir(kind) if not known.startswith("_")]
    own = {known.replace("_", ""): known for known in ours}
    word = re.sub("(_async)?_?$", "", name).lower().replace("_", "")
    found = own.get(word) or _NAMES.get(word, "")
    if not found and word[:1] == "i":  # MPI's calls in the background
        found = own.get(word[1:]) or _NAMES.get(word[1:], "")
        if found in LATER:
            return f"{found}, with async_op=True"
    if re.split(r"\W", found)[0] not in (*ours, "timeout"):
        return ""
    return f"{found}, for objects {found}_object" if f"{found}_object" in ours else found


def of_module(name: str, kind: type) -> str:
    """Return what to say of a name that is looked for in the module, and may be elsewhere."""
    if name in _MADE_BY_INIT:
        return ": comm = pycoll.init() gives the communicator of all ranks"
    known = {constant.lower(): here for constant, here in _CONSTANTS.items()}
    if here := known.get(name.lower(), ""):
        return f": here it is {here}"
    if here := name_here(name, kind):
        return f": comm = pycoll.init(), and comm has it as {here}"
    return ""
