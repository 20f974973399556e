"""Producers, consumers and who sees to the rest: each does one thing at a time, and asks until it has an answer that
settles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch.concat import concat
from dataplane.errors import Closed, DataplaneError, Lost, Misuse, NotReady, Rejected
from dataplane.errors import LeaseExpired as Expired
from dataplane.stream import requests as r
from dataplane.stream.sampler import CompleteGroups, Fifo, Freshest
from tests.simulation import clients
from tests.simulation.stream.columns import Columns
from tests.simulation.stream.machine import GROUP, LABEL, TASKS, columns, decoded_result, versions
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.stream.checker import Checker

_FINAL = (Expired, Rejected, Misuse, Lost)

Answer = r.StreamResult | DataplaneError | None
"""None: not asked again, and no answer came."""


class Call(clients.Call):
    """See `clients.Call`. Rows are not asked for again: what was given comes back by itself."""

    __slots__ = ()

    def encode(self) -> bytes:
        return r.encode_request(self.request)

    @property
    def timeout_s(self) -> float:
        return clients.TIMEOUT_S

    def _again(self) -> None:
        if isinstance(self.request, r.Consume):
            self._end(None)
        else:
            self.send()

    def answered(self, outcome: bytes | DataplaneError) -> None:
        if self._done:
            return
        answer = decoded_result(outcome) if isinstance(outcome, bytes) else outcome
        if isinstance(answer, r.CommandRefused):
            answer = answer.error
        if not isinstance(answer, DataplaneError) or isinstance(answer, _FINAL):
            self._end(answer)
        elif isinstance(answer, NotReady):
            self._end(None)
        else:
            self._refused(answer)


class Client(clients.Client):
    CALL = Call


class StoringClient(Client):
    """A client that stores columns of rows of a partition."""

    def __init__(
        self, world: World, name: str, nodes: int, ask: Callable[[int, Call], None], stored: Columns, partition: int
    ) -> None:
        super().__init__(world, name, nodes, ask)
        self._stored = stored
        self._partition = partition


class Producer(StoringClient):
    """Appends a few rows at a time: rows of groups, in one append or in two; now and then one with a key that another
    producer uses too."""

    _open = ""  # the group that lacks a row

    def run(self) -> None:
        if self.ending and not self._open:
            return
        rng, sequence = self.world.rng, self.next_sequence()
        keys, groups, digest = [], None, b""
        count = rng.randint(1, 2)
        if self._open or rng.random() < 0.6:
            group = self._open or f"{self.name}-{sequence}"
            count = 1 if self._open else rng.randint(1, GROUP)
            self._open = "" if self._open or count == GROUP else group
            groups = [group] * count
        elif rng.random() < 0.4:
            count, keys = 1, [f"k{rng.randrange(30)}"]
            digest = keys[0].encode()
        labels = keys or [f"{self.name}-{sequence}-{i}" for i in range(count)]
        node, shard, copies = self._stored.store(rng, self._partition)
        request = r.Append(
            client=self.name,
            sequence=sequence,
            ref=columns(node, shard, count, "x"),
            versions=versions(count),
            groups=groups,
            keys=keys,
            digest=digest,
            tags={LABEL: labels},
            nodes=copies,
        )
        self.call(request, lambda answer: self._appended(request, answer))

    def _appended(self, request: r.Append, answer: Answer) -> None:
        if not isinstance(answer, r.AppendResult) or not answer.new:
            self._stored.forget(self._partition, request.ref, request.nodes)
        if not isinstance(answer, r.AppendResult | Lost | Closed):
            raise AssertionError(f"an append was answered by {answer!r}")
        if isinstance(answer, Closed):
            self._open = ""
        self.world.after(0.005 + 0.07 * self.world.rng.random(), self.run)


class Gatherer(Producer):
    """Appends rows of two clients as one request, as a node does; now and then one of them is asked for by itself
    meanwhile, as that of a client that has given up."""

    def run(self) -> None:
        if self.ending:
            return
        rng, sequence = self.world.rng, self.next_sequence()
        parts = []
        node, first, copies = self._stored.store(rng, self._partition)
        for copy in copies:
            self._stored.release(copy, self._partition, (node, first))
        for client, shard in (("a", first), ("b", self._stored.store_beside(node, self._partition))):
            count = rng.randint(1, 2)
            parts.append(
                r.Append(
                    client=f"{self.name}{client}",
                    sequence=sequence,
                    ref=columns(node, shard, count, "x"),
                    versions=versions(count),
                    tags={LABEL: [f"{self.name}{client}-{sequence}-{i}" for i in range(count)]},
                )
            )
        left = {part.client for part in parts}

        def settled(part: r.Append, answer: Answer) -> None:
            if part.client not in left:
                return
            left.discard(part.client)
            if not isinstance(answer, r.AppendResult):
                self._stored.forget(self._partition, part.ref, part.nodes)
            if not left:
                self.world.after(0.02 + 0.1 * rng.random(), self.run)

        def alone(part: r.Append) -> None:
            self.call(part, lambda answer: settled(part, answer))

        def together(answer: Answer) -> None:
            for part in parts:
                if part.client in left and isinstance(answer, r.AppendResult):
                    settled(part, answer)
                elif part.client in left:
                    alone(part)

        one, two = parts
        request = r.Append(
            ref=concat([one.ref, two.ref]),
            versions=versions(len(one.ref) + len(two.ref)),
            tags={LABEL: [*one.tags[LABEL], *two.tags[LABEL]]},
            parts=[(part.client, sequence, len(part.ref)) for part in parts],
        )
        self.call(request, together)
        if rng.random() < 0.3:
            self.world.after(0.1 * rng.random(), alone, two)


class Consumer(StoringClient):
    """Takes rows of its task, brings columns of them, acks them, gives them back, keeps them too long or forgets
    them."""

    def __init__(self, *storing: Any, task: str) -> None:
        super().__init__(*storing)
        self.task = task

    def run(self) -> None:
        rng = self.world.rng
        train = self.task == TASKS[0]
        what = 1.0 if self.ending else rng.random()
        sampler = CompleteGroups(GROUP) if what < (0.2 if train else 0.5) else Freshest(1) if what < 0.6 else Fifo()
        request = r.Consume(
            client=self.name,
            task=self.task,
            columns=("x", "reward") if not train and what < 0.2 else ("x",),
            rows=16 if self.ending else 5,
            sampler=sampler,
            lease_s=clients.ROW_LEASE_S,
        )
        self.call(request, self._given)

    def _given(self, answer: Answer) -> None:
        rng = self.world.rng
        if not isinstance(answer, r.Delivered):
            self.world.after(0.03 + 0.06 * rng.random(), self.run)
            return
        what = 0.0 if self.ending else rng.random()
        if what > 0.95:
            self.run()  # forgets them
        elif what > 0.6 and self.task == TASKS[0]:
            self._extend(answer, what)
        else:
            self._settle(answer, what)

    def _extend(self, given: r.Delivered, what: float) -> None:
        node, shard, copies = self._stored.store(self.world.rng, self._partition)
        request = r.Extend(
            client=self.name,
            sequence=self.next_sequence(),
            ref=columns(node, shard, len(given.rows), "reward"),
            rows=given.rows,
            holds=np.full(len(given.rows), given.holds),
            nodes=copies,
        )
        late_s = clients.ROW_LEASE_S * self.world.rng.uniform(0.7, 1.4) if what > 0.88 else 0.0
        self.world.after(late_s, self.call, request, lambda answer: self._extended(request, given, what, answer))

    def _extended(self, request: r.Extend, given: r.Delivered, what: float, answer: Answer) -> None:
        if not isinstance(answer, r.Succeeded):
            self._stored.forget(self._partition, request.ref, request.nodes)
        self._settle(given, what)

    def _settle(self, given: r.Delivered, what: float) -> None:
        rng = self.world.rng
        held_s = clients.ROW_LEASE_S * rng.uniform(0.7, 1.4) if what > 0.85 else 0.03 * rng.random()
        kind = r.Ack if what < 0.75 or what > 0.85 else r.Nack
        request = kind(client=self.name, sequence=self.next_sequence(), grant=given.grant)
        self.world.after(held_s, self.call, request, self._settled)

    def _settled(self, answer: Answer) -> None:
        self.world.after(0.01 * self.world.rng.random(), self.run)


class Janitor(Client):
    """Asks for lost rows, retries or drops dead letters, and drops now and then something else."""

    def __init__(self, world: World, name: str, nodes: int, ask: Callable[[int, Call], None], checker: Checker) -> None:
        super().__init__(world, name, nodes, ask)
        self._checker = checker
        self.closes = False
        """Whether the stream is closed at the end."""

    def run(self) -> None:
        rng, checker = self.world.rng, self._checker
        rows = checker.dead_letters()
        if self.ending and self.closes:
            self.closes = False
            self.call(r.Close(client=self.name, sequence=self.next_sequence()), self._done)
        elif rows and not self.ending and rows[0] % 2:
            task = next(name for task, name in enumerate(TASKS) if checker.model.dead(rows[0], task))
            self.call(r.Retry(client=self.name, sequence=self.next_sequence(), task=task), self._done)
        elif rows or rng.random() < 0.15:
            rows = rows or checker.some(rng)
            offsets = np.array(rows, np.int64)
            self.call(r.Drop(client=self.name, sequence=self.next_sequence(), rows=offsets), self._done)
        elif checker.unnamed or rng.random() < 0.1:
            self.call(r.TakeLost(client=self.name, sequence=self.next_sequence(), most=4), self._done)
        else:
            self._done(None)

    def _done(self, answer: Answer) -> None:
        again_s = 0.1 if self.ending else 0.3
        self.world.after(again_s * self.world.rng.uniform(0.5, 1.5), self.run)


class Mourner(Client):
    def tell(self, node: bytes) -> None:
        self.call(r.Lose(node=node), lambda answer: None)
