"""Producers and consumers: each does one thing at a time, and asks until it has an answer that settles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataplane.errors import DataplaneError, LeaseExpired, Rejected
from dataplane.replication.replica import NotLeader
from tests.simulation.machine import TASKS, Append, Appended, Lease, Leased, Result, Settle, decode_result, encode
from tests.simulation.world import World

ROW_LEASE_S = 0.5
TIMEOUT_S = 0.25


class Call:
    """One request, until it has its answer: sent again, elsewhere, after refusals and silence."""

    __slots__ = ("_client", "_done", "_then", "_try", "encoded", "request")

    timeout_s = TIMEOUT_S

    def __init__(self, client: Client, request: Any, then: Callable[[Any], None]) -> None:
        self._client = client
        self._then = then
        self._done = False
        self._try = 0
        self.request = request
        self.encoded = self.encode()
        self.send()

    def encode(self) -> bytes:
        return encode(self.request)

    def send(self) -> None:
        client = self._client
        self._try += 1
        client.ask(client.target, self)
        client.world.after(self.timeout_s * client.world.rng.uniform(0.8, 1.2), self._silent, self._try)

    def _silent(self, number: int) -> None:
        if not self._done and number == self._try:
            self._client.look_elsewhere()
            self._again()

    def _again(self) -> None:
        """A lease of rows is not asked for again: what the last one took comes back by itself."""
        if isinstance(self.request, Lease):
            self._end(Leased(()))
        else:
            self.send()

    def answered(self, outcome: bytes | DataplaneError) -> None:
        if self._done:
            return
        if isinstance(outcome, bytes):
            self._end(decode_result(outcome))
        elif isinstance(outcome, LeaseExpired | Rejected):
            self._end(outcome)
        else:
            self._refused(outcome)

    def _refused(self, error: DataplaneError) -> None:
        if isinstance(error, NotLeader) and error.leader.startswith("n"):
            self._client.target = int(error.leader[1:])
        else:
            self._client.look_elsewhere()
        self._try += 1
        self._client.world.after(self._client.world.rng.uniform(0.02, 0.06), self._retry, self._try)

    def _retry(self, number: int) -> None:
        if not self._done and number == self._try:
            if self._client.world.rng.random() < 0.2:
                self._client.look_elsewhere()
            self._again()

    def _end(self, answer: Any) -> None:
        self._done = True
        self._client.calls -= 1
        self._then(answer)


class Client:
    """What all clients have in common. `CALL` is what its requests are made as."""

    CALL: type[Call] = Call

    def __init__(self, world: World, name: str, nodes: int, ask: Callable[[int, Call], None]) -> None:
        self.world = world
        self.name = name
        self.ask = ask
        self.target = 0
        self.calls = 0
        self._nodes = nodes
        self._sequence = 0
        self.ending = False

    def look_elsewhere(self) -> None:
        self.target = self.world.rng.randrange(self._nodes)

    def call(self, request: Any, then: Callable[[Any], None]) -> None:
        self.calls += 1
        self.CALL(self, request, then)

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence


class Producer(Client):
    """Appends a few rows at a time, now and then under a key that another producer uses too."""

    def run(self) -> None:
        if self.ending:
            return
        rng = self.world.rng
        sequence = self.next_sequence()
        keyed = rng.random() < 0.2
        rows = tuple(
            (f"k{rng.randrange(30)}" if keyed else "", f"{self.name}-{sequence}-{i}") for i in range(rng.randint(1, 2))
        )
        self.call(Append(self.name, sequence, rows), self._appended)

    def _appended(self, result: Result | DataplaneError) -> None:
        if not isinstance(result, Appended):
            raise AssertionError(f"an append was answered by {result!r}")
        self.world.after(0.005 + 0.09 * self.world.rng.random(), self.run)


class Consumer(Client):
    """Leases rows of its task, and acks them, gives them back, keeps them too long or forgets them."""

    def run(self) -> None:
        task = TASKS[int(self.name[1:]) % len(TASKS)]
        most = 16 if self.ending else 5
        self.call(Lease(self.name, task, most, ROW_LEASE_S), lambda result: self._leased(task, result))

    def _leased(self, task: str, result: Result | DataplaneError) -> None:
        assert isinstance(result, Leased)
        rng = self.world.rng
        if not result.rows:
            self.world.after(0.03 + 0.06 * rng.random(), self.run)
            return
        rows = tuple((offset, lease) for offset, lease, _ in result.rows)
        what = 0.0 if self.ending else rng.random()
        if what > 0.95:
            self.run()  # forgets them
            return
        held_s = ROW_LEASE_S * rng.uniform(0.7, 1.4) if what > 0.85 else 0.03 * rng.random()
        request = Settle(self.name, self.next_sequence(), task, rows, what < 0.75 or what > 0.85)
        self.world.after(held_s, self.call, request, self._settled)

    def _settled(self, result: Result | DataplaneError) -> None:
        self.world.after(0.01 * self.world.rng.random(), self.run)
