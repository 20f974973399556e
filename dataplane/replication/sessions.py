"""Producer sequences: a repeated command gets the result of its first execution.

A producer numbers its commands 1, 2, 3, ... and has at most `WINDOW` of them unanswered. The table keeps the results of
each producer's last `WINDOW` numbers, so commands may overtake each other, and a retry within the window gets the
result of the first attempt. A command with a lower number was answered, since the producer has sent later ones. Its
result is no longer kept, so a retry is refused rather than executed again. Kafka keeps five batches per producer for
the same reason.

The table is part of a state machine's state, and so of its snapshots; its entries are in the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dataplane.errors import Rejected

WINDOW = 16
"""The number of a producer's last commands whose results are kept."""

MAX_SESSIONS = 1 << 16
"""The most producers that are remembered. Those with the latest commands are."""


class _Session(msgspec.Struct, array_like=True):
    last: int = 0
    results: dict[int, bytes] = {}


class Sessions:
    """The table of one partition."""

    __slots__ = ("_sessions",)

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def result(self, producer: str, sequence: int) -> bytes | None:
        """The result of an applied command; None if it was not applied, or if its producer is no longer remembered.
        Raises Rejected for a sequence number below the window, whose result is no longer kept."""
        session = self._sessions.get(producer)
        if session is None:
            return None
        if sequence <= session.last - WINDOW:
            raise Rejected(f"sequence {sequence} of {producer!r} was answered long ago")
        return session.results.get(sequence)

    def keep(self, producer: str, sequence: int, result: bytes) -> None:
        """Remember the result of a command that has just been applied."""
        session = self._sessions.pop(producer) if producer in self._sessions else _Session()
        self._sessions[producer] = session
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session.results[sequence] = result
        if sequence > session.last:
            session.last = sequence
            for number in [n for n in session.results if n <= sequence - WINDOW]:
                del session.results[number]

    @property
    def producers(self) -> list[str]:
        """The producers that are remembered."""
        return list(self._sessions)

    def drop(self, producers: Iterable[str]) -> None:
        """Forget producers that are known to have ended. Call only while a command is applied."""
        for producer in producers:
            self._sessions.pop(producer, None)

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._sessions)

    def restore(self, state: bytes) -> None:
        """Replace the table by a snapshot. Raises msgspec.MsgspecError for an invalid one."""
        self._sessions = msgspec.msgpack.decode(state, type=dict[str, _Session])
