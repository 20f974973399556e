"""What the processes are tied together with: wires that references pass over, and a board for the newest weights.

No array ever passes here. A message is a pickled `BatchRef` of a few hundred bytes, whatever the bytes behind it, and
every byte that passes is counted to show it.

What always holds: a wire holds at most `depth` references that nobody has taken, and whoever sends one more waits. No
wait outlives the job: each also watches the leash, a pipe that the main process holds the other end of. When it lets
go, or dies of whatever cause, everybody gets `Stopped`; as they do when the process at the other end of a wire is gone.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import dataplane as dp

TAKEN = b"taken"


class Stopped(Exception):
    """The job is over."""


class Outlet:
    """The end of a wire where references go in. One process's."""

    def __init__(self, pipe: Connection, leash: Connection, depth: int, passed: Any) -> None:
        self._pipe = pipe
        self._leash = leash
        self._room = depth
        self._passed = passed  # a number in shared memory that this process alone writes

    def send(self, ref: dp.BatchRef) -> None:
        """Send it on its way; waits while the wire is full. Raises Stopped."""
        message = pickle.dumps(ref)
        with _until_stopped():
            while self._room == 0 or self._pipe.poll():
                _await([self._pipe], self._leash)
                self._pipe.recv_bytes()
                self._room += 1
            self._pipe.send_bytes(message)
        self._room -= 1
        self._passed.value += len(message)

    def close(self) -> None:
        self._pipe.close()


class Inlet:
    """The end of one or several wires where references come out. One process's."""

    def __init__(self, pipes: Sequence[Connection], leash: Connection) -> None:
        self._pipes = list(pipes)
        self._leash = leash

    def __iter__(self) -> Iterator[dp.BatchRef]:
        """The references, as they come. Raises Stopped."""
        while True:
            with _until_stopped():
                pipe = _await(self._pipes, self._leash)
                message = pipe.recv_bytes()
                pipe.send_bytes(TAKEN)
            self._pipes.append(self._pipes.pop(self._pipes.index(pipe)))  # the others are first next time
            yield pickle.loads(message)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def wires(context: Any, leash: Connection, depth: int, passed: Sequence[Any]) -> tuple[list[Outlet], Inlet]:
    """As many wires as there are counters in `passed`, and the one inlet that they lead to."""
    pairs = [context.Pipe() for _ in passed]
    outlets = [Outlet(pipe, leash, depth, counter) for (pipe, _), counter in zip(pairs, passed, strict=True)]
    return outlets, Inlet([pipe for _, pipe in pairs], leash)


class Board:
    """Where the trainer pins up the reference of the newest weights. Readers see the newest, or nothing yet."""

    def __init__(self, context: Any, passed: Any) -> None:
        self._note = context.Array("c", 4096)
        self._passed = passed

    def post(self, version: int, weights: dp.BatchRef) -> None:
        """Put up this version in the place of what is there."""
        message = pickle.dumps((version, weights))
        with self._note.get_lock():
            self._note[: len(message)] = message
        self._passed.value += len(message)

    def read(self) -> tuple[int, dp.BatchRef] | None:
        """The newest version and its weights."""
        with self._note.get_lock():
            message = self._note[:]
        return pickle.loads(message) if message.strip(b"\0") else None


def _await(pipes: Sequence[Connection], leash: Connection) -> Connection:
    ready = wait([*pipes, leash])
    if leash in ready:
        raise Stopped
    return next(pipe for pipe in pipes if pipe in ready)


@contextmanager
def _until_stopped() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):  # the process at the other end has gone; the main one says why
        raise Stopped from None
