"""The collectives on arrays: the part of a communicator that most programs need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pycoll.comm.signatures import (
    Op,
    broadcasting,
    gathering,
    moving,
    planning,
    reducing,
    reducing_to_root,
    scattering,
)
from pycoll.runtime.calls.methods import Caller, CallOptions, ReduceOptions, collective
from pycoll.runtime.calls.work import BoundPlan, PersistentCall, make_plan
from pycoll.runtime.sessions.session import Session
from pycoll.schedule.ir import Algorithm
from pycoll.types import Kind

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack


class Collectives(Caller):
    """The methods of `pycoll.Communicator` in which arrays of all ranks have one shape."""

    _session: Session

    @reducing(Kind.ALL_REDUCE)
    def all_reduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        order: str | None = None,
        algorithm: str | Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combine the arrays of all ranks; every rank gets the result.

        Args:
            x: Array of any shape, the same on every rank.
            op: ``sum``, ``prod``, ``min``, ``max``, ``avg``; for integers ``and``, ``or``, ``xor``.
                Sums of integers wrap; their ``avg`` is the wrapped sum divided, towards zero. Or a
                function of two NumPy arrays that returns one of their shape and dtype, the same on
                every rank. It must be associative, and need not be commutative: lower ranks come
                first, combined in ``order``. It is called in this thread, with all arrays in
                memory, and changes none of them. Or a function of C, by ctypes or `numba.cfunc`,
                ``void f(const T *a, const T *b, T *out, ssize_t count)`` for elements T of ``x``.
            out: Array of the shape of ``x``.
            order: ``tree`` (the in-order balanced tree), ``rank`` (the serial loop over ranks) or
                ``any`` (whatever is fastest). By default ``tree``, or with ``algorithm`` the order
                of that.
            algorithm: See the class.
            timeout: See the class.
            async_op: See the class.
            stream: See the class.

        Returns:
            The combined array, bit-identical on all ranks.
        """

    @reducing(Kind.REDUCE_SCATTER)
    def reduce_scatter(
        self, x: Any, op: Op = "sum", *, out: Any = None, **options: Unpack[ReduceOptions]
    ) -> Any:
        """Combine all arrays; rank r gets block r: ``[n * k, ...]`` -> ``[k, ...]``.

        ``op`` and ``order`` are those of `all_reduce`.
        """

    @reducing_to_root(Kind.REDUCE)
    def reduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        root: int = 0,
        out: Any = None,
        **options: Unpack[ReduceOptions],
    ) -> Any:
        """Combine the arrays of all ranks on the root; the other ranks get None.

        ``op`` and ``order`` are those of `all_reduce`.
        """

    @moving(Kind.ALL_GATHER)
    def all_gather(self, x: Any, *, out: Any = None, **options: Unpack[CallOptions]) -> Any:
        """Concatenate all arrays along the first axis: ``[k, ...]`` -> ``[n * k, ...]``."""

    @broadcasting(Kind.BROADCAST, in_place=True)
    def broadcast(
        self, x: Any, root: int = 0, *, out: Any = None, **options: Unpack[CallOptions]
    ) -> Any:
        """Copy the root's array into ``x`` on every other rank, and return ``x``.

        On the root ``x`` is only read, and may be read-only or not contiguous. With ``out`` the
        result goes there instead; then ``x`` stays as it is, and tells shape and dtype.

        Raises:
            ArgumentError: Also if ``x`` cannot be written to, or is not contiguous, on a rank that
                is not the root, and there is no ``out``.
        """

    @gathering(Kind.GATHER)
    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, **options: Unpack[CallOptions]
    ) -> Any:
        """Concatenate all arrays on the root: ``[k, ...]`` -> ``[n * k, ...]``; others get None."""

    @scattering(Kind.SCATTER)
    def scatter(
        self, x: Any = None, root: int = 0, *, out: Any = None, **options: Unpack[CallOptions]
    ) -> Any:
        """Give rank r block r of the root's array: ``[n * k, ...]`` -> ``[k, ...]``.

        On ranks other than the root pass either ``out``, or an ``x`` that tells shape and dtype.
        """

    @moving(Kind.ALL_TO_ALL)
    def all_to_all(self, x: Any, *, out: Any = None, **options: Unpack[CallOptions]) -> Any:
        """Send block j to rank j; block i of the result came from rank i.

        ``[n * k, ...]`` -> ``[n * k, ...]``, n blocks of k rows.
        """

    @collective(Kind.BARRIER)
    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""

    @planning
    def plan(
        self,
        collective: str,
        like: Any,
        op: str = "sum",
        *,
        out: Any = None,
        persistent: bool = False,
        root: int = 0,
        order: str | None = None,
        algorithm: str | Algorithm | None = None,
    ) -> BoundPlan | PersistentCall:
        """Check and compile a collective before its first call: ``plan(x, out=x)``.

        It refuses arrays of another shape or dtype. Calls of the method itself are remembered as
        well, so such a plan saves the time of the first call only. A persistent one is bound to the
        arrays themselves, and ``plan()`` is the fastest call there is.

        Args:
            collective: Name of a method, from ``all_reduce`` to ``all_to_all``.
            like: Array of the shape and dtype that will be used; if persistent, the array.
            op: Reduction operation.
            out: If persistent, array for the result; None: one that is made now.
            persistent: Run on these arrays, which must stay as they are, as in MPI 4.
            root: Root rank.
            order: Reduction order.
            algorithm: See the class.

        Returns:
            What runs it: ``plan(x, out=None, timeout=None, async_op=False)``, keywords but ``x``;
            if persistent, ``plan()``, which returns the same array every time; a new one without
            ``out``, if it is on a device or ``op`` is a function.
        """
        _ = self._session.engine  # raises CommClosed
        given = {"op": op, "root": root, "order": order, "algorithm": algorithm}
        return make_plan(self, self._session, collective, like, out, persistent, given)
