"""Calls on Python objects: a part of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pycoll.comm.messages import ANY, Messages
from pycoll.runtime.calls.methods import message, of_objects, reports_misuse
from pycoll.runtime.calls.parts import object_messages, objects
from pycoll.runtime.calls.work import Work
from pycoll.types import Kind

_T = TypeVar("_T")


class Objects(Messages):
    """The methods of `pycoll.Communicator` for Python objects.

    They take what is data: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset
    and dict, NumPy arrays and scalars, and these inside of each other. They travel as msgpack
    (``pip install msgpack``), a bytearray or memoryview as bytes; no code runs when they are read.
    ``pickle=True``, on every rank, takes any object that can be pickled: reading a pickle runs
    whatever its sender has put there.

    `ArgumentError`, on the rank that has it, for an object that cannot be sent; its peers raise
    `PeerRejected`. Objects are for settings and small results: for large arrays use the calls on
    arrays, which copy less.
    """

    @of_objects(Kind.BROADCAST_OBJECT)
    @reports_misuse
    def broadcast_object(
        self, x: Any = None, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Return the root's object on every rank; on other ranks ``x`` does not matter."""
        return objects.broadcast(self._session, x, root, pickle, timeout)

    @of_objects(Kind.ALL_GATHER_OBJECT)
    @reports_misuse
    def all_gather_object(
        self, x: _T, *, pickle: bool = False, timeout: float | None = None
    ) -> list[_T]:
        """Return the list of the objects of all ranks, by rank, on every rank."""
        return objects.gather(self._session, Kind.ALL_GATHER_OBJECT, x, 0, pickle, timeout) or []

    @of_objects(Kind.GATHER_OBJECT)
    @reports_misuse
    def gather_object(
        self, x: Any, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any] | None:
        """Return the list of the objects of all ranks, by rank, on the root; others get None."""
        return objects.gather(self._session, Kind.GATHER_OBJECT, x, root, pickle, timeout)

    @of_objects(Kind.SCATTER_OBJECT)
    @reports_misuse
    def scatter_object(
        self,
        xs: Sequence[Any] | None = None,
        root: int = 0,
        *,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Give rank r the r-th object of the root's list; on other ranks ``xs`` does not matter."""
        return objects.scatter(self._session, xs, root, pickle, timeout)

    @of_objects(Kind.ALL_TO_ALL_OBJECT)
    @reports_misuse
    def all_to_all_object(
        self, xs: Sequence[Any], *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """Send the j-th object of ``xs`` to rank j; the i-th of the result came from rank i."""
        return objects.all_to_all(self._session, xs, pickle, timeout)

    @message
    def send_object(
        self, x: Any, dst: int, tag: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> None:
        """Send an object to one rank, which receives it with `recv_object`; see `send`."""
        object_messages.send(self._session, x, dst, tag, pickle, timeout)

    @message
    def recv_object(
        self,
        src: int = ANY,
        tag: int = 0,
        *,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Receive the next object with this tag, and return it; see `recv`.

        Raises:
            MismatchError: If the next message is an array, of `send`; it stays.
        """
        return object_messages.recv(self._session, src, tag, pickle, timeout)

    def isend_object(self, x: Any, dst: int, tag: int = 0, *, pickle: bool = False) -> Work:
        """Send an object in the background, as it is now; see `isend`."""
        return object_messages.isend(self._session, x, dst, tag, pickle)

    def irecv_object(self, src: int = ANY, tag: int = 0, *, pickle: bool = False) -> Work:
        """Receive an object in the background: `Work.wait` returns it.

        Objects go to these calls, and to `recv_object`, in the order of the calls. A `Work` that is
        dropped receives nothing.
        """
        return object_messages.ObjectReceive(self._session, src, tag, pickle)
