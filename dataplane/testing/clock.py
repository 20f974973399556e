"""A clock that a test advances."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.clock import Clock


class ManualClock:
    """Seconds, as `dataplane.clock.Clock`: those of `base`, plus the sum of its advances.

    Without `base` it stands still between two calls of `advance`; with `base=dataplane.clock.monotonic` time passes
    as usual too. Thread-safe. It never goes back.
    """

    def __init__(self, start: float = 0.0, *, base: Clock | None = None) -> None:
        self._base = base
        self._ahead = start
        self._advanced: list[Callable[[], None]] = []

    def __call__(self) -> float:
        return self._ahead + (self._base() if self._base is not None else 0.0)

    def advance(self, seconds: float) -> None:
        """Move the clock `seconds` forward, then run the callbacks of `on_advance`. Raises ValueError below 0."""
        if not seconds >= 0:
            raise ValueError(f"a clock never goes back: {seconds!r} seconds")
        self._ahead += seconds
        for each in list(self._advanced):
            each()

    def on_advance(self, call: Callable[[], None]) -> None:
        """Call `call()` after each `advance`, in the thread that advances."""
        self._advanced.append(call)

    def __repr__(self) -> str:
        return f"ManualClock({self():g} s)"
