"""What users of MPI, PyTorch and Horovod pass to calls, and what it is here: for errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable)
LATER = (  # what takes async_op
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"),
    *("all_to_all", "barrier", "scan", "exscan"),
)
_FILLING = frozenset(LATER) - {"barrier"}  # what takes out
_WORDS = {  # keyword arguments
    **{"dest": "dst", "source": "src", "root_rank": "root", "src": "root", "dst": "root"},
    **{"recvbuf": "out", "output": "out", "output_tensor": "out", "sendbuf": "x", "sendobj": "x"},
    **{"obj": "x", "tensor": "x", "input": "x", "input_tensor": "x", "reduce_op": "op"},
    **{"sendtag": "tag", "group": "a communicator of split()", "ranks": "color"},
    **{"recvtag": "recv_tag", "asynchronous": "async_op", "average": 'op="avg"'},
    **{"sendcounts": "counts", "status": "probe(src), before the call", "inplace": "out=x"},
    **{"splits": "counts", "input_split_sizes": "counts", "scatter_list": "x, one array of blocks"},
    **dict.fromkeys(("tensor_list", "gather_list", "output_tensor_list"), "out, one array"),
    **{"buf": "x", "object_list": "x", "process_set": "a communicator of split()"},
    **{"recvobj": "the result", "keepdims": "x.sum(axis), of NumPy"},
}
_NO_WORDS = {  # and such as are not needed, or stand for something else
    **dict.fromkeys(
        ("axis", "dim"),
        "ranks are combined element by element, or joined along the first axis",
    ),
    **dict.fromkeys(
        ("recvcounts", "rdispls", "displs", "sdispls", "output_split_sizes"),
        "ranks tell each other how much they send: all_gather_v(x), all_to_all_v(x, counts)",
    ),
    **dict.fromkeys(("dtype", "datatype", "count"), "the array tells dtype and size"),
    "name": "calls have no names: every rank makes the same ones in the same order",
}
_OF_INIT = {  # keyword arguments
    **dict.fromkeys(
        ("rank", "world_size", "init_method", "store"),
        "the launcher tells it, such as `pycoll run -n N`",
    ),
    **dict.fromkeys(("backend", "device"), "it goes by where arrays lie; see its `transport`"),
}
_CALL = r"Communicator\.(\w+)\(\)"


def explained(text: str) -> str:
    """Return the text that Python has for wrong arguments, with what they are here."""
    plain = re.sub(r"\. Did you mean '\w+'\?$", "", text)  # what Python 3.13 guesses
    more = _positional(plain) or _keyword(plain)
    return f"{plain}; {more}" if more else text


def explains(function: _F) -> _F:
    """Make a function explain the error for a call that does not fit its signature."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is None:  # it has not begun
                error.args = (explained(str(error)),)
            raise

    return call


def _positional(text: str) -> str:
    if re.fullmatch(r"Communicator\.recv\(\) missing 1 required [a-z ]*argument: 'x'", text):
        return "here it is recv(x, src), which fills x, and recv_object(src) for objects"
    if re.fullmatch(r"Communicator\.__init__\(\) missing [^;]*", text):
        return "comm = pycoll.init() gives the communicator of all ranks"
    said = re.fullmatch(rf"{_CALL} takes \d+ positional arguments? but \d+ were given", text)
    if said is None:
        return ""
    if said[1].endswith("_object"):
        return "the list of all objects is what it returns"
    fills = said[1].removesuffix("_v") in _FILLING
    return "the array for the result is given by name, as out=" if fills else ""


def _keyword(text: str) -> str:
    said = re.fullmatch(rf"(?:{_CALL}|init\(\)) got an unexpected keyword argument '(\w+)'", text)
    if said is None:
        return ""
    if said[1] is None:  # perhaps another init, for which this text is no lie
        needless = _OF_INIT.get(said[2], "")
        return needless and f"pycoll.init() takes none: {needless}"
    here = _WORDS.get(said[2], "")
    return f"here it is {here}" if here else _NO_WORDS.get(said[2], "")
