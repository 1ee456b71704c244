"""Pipeline schedules by name."""

from __future__ import annotations

import difflib

from pycoll.errors import ScheduleError
from pycoll.parallel.pipeline import schedules, streams
from pycoll.parallel.pipeline.program import Schedule

SCHEDULES: tuple[Schedule, ...] = (
    schedules.naive,
    schedules.gpipe,
    schedules.one_f_one_b,
    schedules.interleaved(2),
    schedules.zb_h1,
    schedules.zb_v,
    schedules.dualpipe_v,
    streams.pipedream,
    streams.pipedream_sync,
    streams.two_bw,
)


def find(name: str | Schedule) -> Schedule:
    """Return a schedule: ``"1f1b"``, ``"interleaved:3"`` for three chunks a stage, or one itself.

    Raises:
        ScheduleError: For a name that is not known, with those that are.
    """
    if isinstance(name, Schedule):
        return name
    kind, _, count = name.partition(":")
    if kind == "interleaved" and (count or "2").isdecimal() and int(count or "2") > 0:
        return schedules.interleaved(int(count or "2"))
    known = {schedule.name: schedule for schedule in SCHEDULES}
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ScheduleError(
            f"there is no pipeline schedule {name!r}{hint} Known are {', '.join(known)}"
        )
    return known[name]
