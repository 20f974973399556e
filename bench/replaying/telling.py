"""What the processes of a replay tell the one that watches them, over a pipe each. Times are those of the monotonic
clock, which all processes of a host share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ready:
    """A process is connected, and waits for the word to begin."""

    process: str


@dataclass(frozen=True, slots=True)
class Did:
    """A process is done with rows: made them, or did its task on them. `began` is when it had them."""

    process: str
    task: str
    rows: list[int]
    began: float
    at: float
    #: Of the trainer's: rows of the whole update, of all ranks; and the mean policy versions that they are behind.
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
    """What rollout workers are told: the newest version, and how many rows are trained or have expired."""

    version: int
    done: int


@dataclass
class Spent:
    """Seconds of one process by what it waited for, and bytes. `rows`: for rows to be ready; `room`: for its own bytes
    to be written, or for room for them; `bytes`: for those of others to be read; `ranks`: for each other; `policy`: for
    the trainer; `check`: while checksums were compared; `compute`: in the place of computing, beyond that; `late`: how
    much longer than that was meant to be, which is the machine's own doing."""

    seconds: dict[str, float] = field(default_factory=dict)
    read: int = 0
    written: int = 0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the block's time."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began

    def paused(self, meant: float, began: float) -> None:
        """A wait of so many seconds in the place of computing, which began then, is over."""
        took = time.monotonic() - began
        for what, seconds in (("compute", took), ("late", took - max(0.0, meant))):
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def told(self) -> dict[str, float]:
        """As a report has it."""
        return {f"{what}_s": seconds for what, seconds in self.seconds.items()} | {
            "read_bytes": self.read,
            "written_bytes": self.written,
        }
