"""Starts, messages, replaces and ends the workers of an executor, as processes of this host or as actors of Ray."""

from __future__ import annotations

import multiprocessing
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from dataplane.pipeline.functions import Functions
from dataplane.pipeline.worker import ExecutorGone, ExecutorLink, work

STOP_S = 5.0  # seconds until a worker that does not end is killed


class Crew(ABC):
    """The workers of one executor, by number. Used by one thread."""

    @abstractmethod
    def start(self, worker: int, address: str) -> None:
        """Start a worker, or the replacement of one that has gone."""

    @abstractmethod
    def send(self, worker: int, message: bytes) -> None:
        """Send a message to a worker. A message to a dead worker is dropped, since `hear` reports the death."""

    @abstractmethod
    def hear(self, timeout: float) -> Iterator[tuple[int, bytes | None]]:
        """The messages of workers within `timeout` seconds; None, once, for a dead worker."""

    @abstractmethod
    def close(self) -> None:
        """End all workers within a bounded time. They have ended when this returns."""


class ProcessLink(ExecutorLink):
    """A link over a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: bytes) -> None:
        try:
            self._pipe.send_bytes(message)
        except OSError as error:
            raise ExecutorGone from error

    def receive(self, *, wait: bool) -> bytes | None:
        try:
            return self._pipe.recv_bytes() if wait or self._pipe.poll() else None
        except (EOFError, OSError) as error:
            raise ExecutorGone from error


def live(pipe: Connection, address: str, functions: Functions) -> None:
    """The main function of a worker's process."""
    with suppress(ExecutorGone, KeyboardInterrupt):
        work(ProcessLink(pipe), address, functions)


class Processes(Crew):
    """Processes of this host, started by a method of `multiprocessing` that does not fork this one."""

    def __init__(self, functions: Functions, method: str = "spawn") -> None:
        if method not in ("spawn", "forkserver"):
            raise ValueError(f"workers are started by spawn or forkserver, not {method}")
        self._functions = functions
        self._context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, tuple[Any, Connection]] = {}
        self._selector = selectors.DefaultSelector()

    def start(self, worker: int, address: str) -> None:
        """Start a process."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=live, args=(theirs, address, self._functions), name=f"pipeline worker {worker}", daemon=True
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes[worker] = (process, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def send(self, worker: int, message: bytes) -> None:
        """Send a message over the worker's pipe."""
        with suppress(OSError, KeyError):
            self._processes[worker][1].send_bytes(message)

    def hear(self, timeout: float) -> Iterator[tuple[int, bytes | None]]:
        """The messages of all readable pipes; None for a dead process, which is removed."""
        for key, _ in self._selector.select(timeout):
            pipe: Any = key.fileobj
            try:
                while True:
                    yield key.data, pipe.recv_bytes()
                    if not pipe.poll():
                        break
            except (EOFError, OSError):
                self._end(key.data, kill=True)
                yield key.data, None

    def pid(self, worker: int) -> int:
        """The process id of a worker."""
        return int(self._processes[worker][0].pid)

    def _end(self, worker: int, *, kill: bool) -> None:
        process, pipe = self._processes.pop(worker)
        self._selector.unregister(pipe)
        if kill:
            process.kill()
        pipe.close()
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()

    def close(self) -> None:
        """Close the pipes, which ends the processes; kill those that do not end."""
        for _, pipe in self._processes.values():
            self._selector.unregister(pipe)
            pipe.close()
        deadline = time.monotonic() + STOP_S
        for process, _ in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes.clear()
        self._selector.close()
