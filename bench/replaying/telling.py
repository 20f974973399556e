"""The messages between the processes of a replay and the main process, over a pipe each. Times are of the monotonic
clock, which all processes of a host share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ready:
    """A process is connected. Rollout workers wait for the first `Policy`."""

    process: str


@dataclass(frozen=True, slots=True)
class Did:
    """A process has made rows, or has done its task on them, at the time `at`. It had them at `began`."""

    process: str
    task: str
    rows: list[int]
    began: float
    at: float
    #: Of the trainer: the rows of the whole update, of all ranks, and their mean lag in policy versions.
    update: int = 0
    lag: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has done all of its work."""

    process: str
    spent: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """A process ended with an error."""

    process: str
    error: str


@dataclass(frozen=True, slots=True)
class Policy:
    """To rollout workers: the newest version, and the number of rows that are trained or expired."""

    version: int
    done: int


@dataclass
class Spent:
    """Seconds of a process by the reason of its waits, and bytes read and written. `rows`: for ready rows; `room`: for
    room and writes of its own bytes; `bytes`: for reads; `ranks`: for other ranks; `policy`: for the trainer; `check`:
    comparing checksums; `compute`: instead of computing, beyond the checks; `late`: the excess of such waits over the
    planned time, due to the machine."""

    seconds: dict[str, float] = field(default_factory=dict)
    read: int = 0
    written: int = 0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Add the block's time to the reason `what`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began

    def paused(self, meant: float, began: float) -> None:
        """Add a wait instead of computing that began at `began` and was planned to take `meant` seconds."""
        took = time.monotonic() - began
        for what, seconds in (("compute", took), ("late", took - max(0.0, meant))):
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def told(self) -> dict[str, float]:
        """The figures of a report, by name."""
        return {f"{what}_s": seconds for what, seconds in self.seconds.items()} | {
            "read_bytes": self.read,
            "written_bytes": self.written,
        }
