"""Workers as actors of Ray: each connects to the node of its Ray node (call `dataplane.integrations.ray.up()` in the
driver first).

An actor works in a thread of its own and communicates by remote calls: `tell` adds a message, `hear` waits for
messages. One call of `hear` is in progress for each actor. Calls of an actor with several threads may overtake each
other, so messages are numbered and put in order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from dataplane.errors import Misuse
from dataplane.pipeline.crews import Crew
from dataplane.pipeline.functions import Functions
from dataplane.pipeline.worker import ExecutorGone, ExecutorLink, work

_HEAR_S = 5.0  # seconds for which a call of `hear` waits for a message


class _QueueLink(ExecutorLink):
    def __init__(self) -> None:
        self.told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._telling, self._next = threading.Lock(), 0
        self._early: dict[int, bytes] = {}  # messages that came before others with smaller numbers

    def tell(self, number: int, message: bytes) -> None:
        with self._telling:
            self._early[number] = message
            while self._next in self._early:
                self.told.put(self._early.pop(self._next))
                self._next += 1

    def send(self, message: bytes) -> None:
        self.said.put(message)

    def receive(self, *, wait: bool) -> bytes | None:
        try:
            message = self.told.get(block=wait)
        except queue.Empty:
            return None
        if message is None:
            raise ExecutorGone
        return message


class Actor:
    """The Ray actor of a worker. Its calls run in threads beside the worker's thread."""

    def __init__(self, address: str, functions: Functions) -> None:
        self._link = _QueueLink()
        self._thread = threading.Thread(target=work, args=(self._link, address, functions), daemon=True)
        self._thread.start()

    def tell(self, number: int, message: bytes) -> None:
        """Pass a message to the worker, after all messages with smaller numbers."""
        self._link.tell(number, message)

    def hear(self) -> list[bytes]:
        """Wait up to `_HEAR_S` seconds for messages of the worker. Returns all messages so far, possibly none. Raises
        RuntimeError if the worker has ended."""
        deadline = time.monotonic() + _HEAR_S
        said: list[bytes] = []
        while not said and time.monotonic() < deadline:
            try:
                said.append(self._link.said.get(timeout=0.5))
            except queue.Empty:
                if not self._thread.is_alive():
                    raise RuntimeError("the worker has ended") from None
        while not self._link.said.empty():
            said.append(self._link.said.get())
        return said

    def stop(self) -> None:
        """End the worker, and close its plane."""
        self._link.told.put(None)
        self._thread.join(_HEAR_S)


class Actors(Crew):
    """Actors of this process's Ray job. `resources`: of each actor, such as {"num_cpus": 1}. Raises Misuse without
    `ray.init()`."""

    def __init__(self, functions: Functions, resources: dict[str, Any] | None = None) -> None:
        import ray  # an extra

        if not ray.is_initialized():
            raise Misuse("workers on Ray need ray.init() first, and dataplane.integrations.ray.up()")
        self._ray: Any = ray
        self._functions = functions
        self._options = {"max_concurrency": 4, "max_restarts": 0, "num_cpus": 0} | (resources or {})
        self._actors: dict[int, Any] = {}
        self._hearing: dict[Any, int] = {}
        self._told: dict[int, int] = {}  # messages to each

    def start(self, worker: int, address: str) -> None:
        """Start an actor."""
        actor = self._ray.remote(Actor).options(**self._options).remote(address, self._functions)
        self._actors[worker], self._told[worker] = actor, 0
        self._hearing[actor.hear.remote()] = worker

    def send(self, worker: int, message: bytes) -> None:
        """Send by a remote call, without waiting for its result."""
        if worker in self._actors:
            self._actors[worker].tell.remote(self._told[worker], message)
            self._told[worker] += 1

    def hear(self, timeout: float) -> Iterator[tuple[int, bytes | None]]:
        """The messages of finished calls of `hear`; None for an ended actor, which is killed."""
        done, _ = self._ray.wait(list(self._hearing), num_returns=1, timeout=timeout, fetch_local=False)
        for call in done:
            worker = self._hearing.pop(call)
            try:
                said = self._ray.get(call)
            except (self._ray.exceptions.RayError, RuntimeError):
                self._ray.kill(self._actors.pop(worker), no_restart=True)
                yield worker, None
                continue
            self._hearing[self._actors[worker].hear.remote()] = worker
            for message in said:
                yield worker, message

    def actor(self, worker: int) -> Any:
        """The handle of a worker's actor."""
        return self._actors[worker]

    def close(self) -> None:
        """Let all actors stop, and kill them after a bounded time."""
        stopping = [actor.stop.remote() for actor in self._actors.values()]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=2 * _HEAR_S)
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._hearing.clear()
