"""How much of the cores others use."""

import os
import resource


class Others:
    """The share of the cores that other processes, and other guests of the host, have used."""

    def __init__(self):
        self._start = self._now()

    def share(self):
        """Return it, since the object was made."""
        busy, ours, total = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy - ours) / max(total, 1e-9)

    def _now(self):
        with open("/proc/stat", encoding="ascii") as lines:
            ticks = [int(text) for text in lines.readline().split()[1:9]]
        total = sum(ticks) / os.sysconf("SC_CLK_TCK")
        idle = (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return total - idle, sum(u.ru_utime + u.ru_stime for u in used), total
