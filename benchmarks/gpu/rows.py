"""Results of the stages: one JSON object a line, on disk as soon as it is known."""

import json
from pathlib import Path


class Writer:
    """Appends rows to a file; what is written survives whatever happens to the process."""

    def __init__(self, path, stage):
        self._path, self._stage = path, stage

    def row(self, name, ok=None, **facts):
        """Write what was found; ``ok`` is None for what is only measured."""
        text = json.dumps({"stage": self._stage, "name": name, "ok": ok, **facts})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def read(path):
    """Return all rows; a line that was cut off by the end of a process is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
