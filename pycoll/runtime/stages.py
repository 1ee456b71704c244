"""Running the stages of one call in two levels.

The first slice shows whether all ranks make this call: until it has passed between hosts, nothing
else is sent there, so that a call which somebody refuses counts once on every rank.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pycoll.errors import PeerRejected
from pycoll.runtime.hierarchy import AHEAD, Slice
from pycoll.schedule.ir import IN, OUT, TMP

if TYPE_CHECKING:
    from pycoll.runtime.prepared import Prepared
    from pycoll.runtime.two_level import TwoLevelSession

_OWNER_FIRST_S = 3.0  # who waits for another host knows better why it takes long


class StagedCall:
    """A call on one rank, stage by stage."""

    def __init__(
        self, session: TwoLevelSession, prepared: Prepared, scratch: int, limit: float, site: str
    ) -> None:
        """Make ready.

        Args:
            session: Whose call it is.
            prepared: Its arrays.
            scratch: Address of scratch memory.
            limit: Seconds it may wait.
            site: Where it was made.
        """
        self._flat, self._node, self._limit = session, session.node, limit
        self._at = {IN: prepared.in_ptr, OUT: prepared.out_ptr, TMP: scratch}
        self.counted = False  # MPI's engine has counted the call
        self._here, self._there = session.node.engine.site(site), session.engine.site(site)

    def at_once(self, part: Slice) -> None:
        """Run a call of one small slice."""
        self._inside(part, "before")
        if part.across is not None:
            try:
                self._between(part, self._flat.engine.run)
            except PeerRejected as error:
                self._pass_on(error)
        self._inside(part, "between")
        self._inside(part, "after", _OWNER_FIRST_S)

    def pipelined(self, parts: list[Slice]) -> None:
        """Run all slices, a few of them under way between hosts at any time."""
        under_way: deque[tuple[Slice, int]] = deque()
        for i, part in enumerate(parts):
            if i != 1:  # the second has been combined while the first moved
                self._inside(part, "before")
            ticket = self._between(part, self._flat.engine.submit) if part.across else -1
            self._inside(part, "between")
            if i == 0:
                if len(parts) > 1:
                    self._inside(parts[1], "before")
                self._wait(ticket)
            under_way.append((part, -1 if i == 0 else ticket))
            if len(under_way) > AHEAD:
                self._finish(*under_way.popleft())
        for entry in under_way:
            self._finish(*entry)

    def _between(self, part: Slice, start: object) -> int:
        self.counted = True
        source, target = (self._at[end] for end in part.ends["across"])
        args = part.across, source, target, self._there, self._limit
        return self._flat.guard(start, *args)

    def _inside(self, part: Slice, name: str, more: float = 0.0) -> None:
        call = getattr(part, name)
        if call is None:
            return
        source, target = (self._at[end] for end in part.ends[name])
        engine = self._node.engine
        self._node.guard(engine.run, call, source, target, self._here, self._limit + more)

    def _wait(self, ticket: int) -> None:
        if ticket < 0:
            return
        try:
            self._flat.guard(self._flat.engine.wait, ticket, -1.0)
        except PeerRejected as error:
            self._pass_on(error)

    def _pass_on(self, error: PeerRejected) -> None:
        """Tell the ranks of this host, which wait for this one."""
        self._node.guard(self._node.engine.refuse, str(error), 0)
        raise error

    def _finish(self, part: Slice, ticket: int) -> None:
        self._wait(ticket)
        self._inside(part, "after", _OWNER_FIRST_S)
