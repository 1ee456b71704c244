"""What users of MPI, PyTorch, Horovod, JAX and CuPy write, and what it is here: for errors."""

from __future__ import annotations

import re

from pycoll.comm.communicator import Communicator
from pycoll.comm.grid import Grid

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
    "ppermute": "sendrecv",
    "psum": "all_reduce",
    "pmean": 'all_reduce(x, "avg")',
    "pmax": 'all_reduce(x, "max")',
    "pmin": 'all_reduce(x, "min")',
    "psumscatter": "reduce_scatter",
    "processallgather": "all_gather(x[None])",
    "broadcastonetoall": "broadcast",
    "syncglobaldevices": "barrier()",
    "groupedallreduce": "all_reduce",
    "ssend": "send",
    "createcart": "grid",
    "newgroup": "split",
    "clone": "dup",
    "free": "close",
    "disconnect": "close",
    "shutdown": "close",
    "destroyprocessgroup": "close",
}
_WORDS = {  # keyword arguments
    **{"dest": "dst", "source": "src", "root_rank": "root", "src": "root", "dst": "root"},
    **{"recvbuf": "out", "output": "out", "output_tensor": "out", "sendbuf": "x", "sendobj": "x"},
    **{"obj": "x", "tensor": "x", "input": "x", "input_tensor": "x", "reduce_op": "op"},
    **{"sendtag": "tag", "group": "a communicator of split()", "ranks": "color"},
    **{"recvtag": "tag", "asynchronous": "async_op"},
}


_OURS = [name for name in dir(Communicator) if not name.startswith("_")]


def explain(error: BaseException) -> None:
    """Add to the text of an error that comes from such a habit what the thing is called here."""
    if isinstance(error, AttributeError) and isinstance(error.obj, (Communicator, Grid)):
        here = name_here(error.name or "")
        error.obj = None if here else error.obj  # Python has nothing to add
    elif isinstance(error, TypeError):
        here = _argument_here(str(error))
    else:
        return
    if here:
        error.args = (f"{error}; here it is {here}",)


def name_here(name: str) -> str:
    """Return what is called that elsewhere; empty if nothing is."""
    own = {known.replace("_", ""): known for known in _OURS}
    word = re.sub("(_async)?_?$", "", name).lower().replace("_", "")
    found = own.get(word) or _NAMES.get(word, "")
    return f"{found}, for objects {found}_object" if f"{found}_object" in _OURS else found


def of_module(name: str) -> str:
    """Return what to say of a name that is looked for in the module, and may be elsewhere."""
    if name in ("COMM_WORLD", "MPI", "Init", "init_process_group"):
        return ": comm = pycoll.init() gives the communicator of all ranks"
    if here := name_here(name):
        return f": comm = pycoll.init(), and comm has it as {here}"
    return ""


def _argument_here(text: str) -> str:
    """Return what an argument is called, from the text that Python has for an unknown one."""
    if text.startswith("Messages.recv() missing"):
        return "recv(x, src), which fills x, and recv_object(src) for objects"
    said = re.match(r"(\w+)\.\w+\(\) got an unexpected keyword argument '(\w+)'", text)
    if said is None or said[1] not in {kind.__name__ for kind in Communicator.__mro__}:
        return ""
    return _WORDS.get(said[2], "")
