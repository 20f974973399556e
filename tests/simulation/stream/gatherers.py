"""Consumers that take rows of all partitions at once and ack them together, in two phases: so that they count in all
partitions, or in none. Some change their minds between the phases, and some die there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dataplane.stream import requests as r
from dataplane.stream.sampler import Fifo
from tests.simulation import clients
from tests.simulation.checker import Violation
from tests.simulation.stream.clients import Answer, Call, Client
from tests.simulation.world import World

_Then = Callable[[list[Answer]], None]


class Gatherer:
    """One such. `asks`: the way to each partition."""

    def __init__(
        self, world: World, name: str, nodes: int, asks: Sequence[Callable[[int, Call], None]], task: str
    ) -> None:
        self._world = world
        self._base = name
        self._lives = 1
        self._task = task
        self._each = [Client(world, f"{name}.1", nodes, ask) for ask in asks]
        self.ending = False

    @property
    def name(self) -> str:
        return f"{self._base}.{self._lives}"

    @property
    def calls(self) -> int:
        return sum(each.calls for each in self._each)

    def _ask(self, asked: dict[Client, Callable[[Client], Any]], then: _Then) -> None:
        """Ask some partitions, and go on with their answers once all have come."""
        answers: dict[Client, Answer] = {}

        def answered(client: Client, answer: Answer) -> None:
            answers[client] = answer
            if len(answers) == len(asked):
                then([answers[each] for each in asked])

        for client, request in asked.items():
            client.call(request(client), lambda answer, client=client: answered(client, answer))

    def run(self) -> None:
        def consume(client: Client) -> r.Consume:
            return r.Consume(
                client=client.name,
                task=self._task,
                columns=("x",),
                rows=16 if self.ending else 3,
                sampler=Fifo(),
                lease_s=clients.ROW_LEASE_S,
            )

        self._ask(dict.fromkeys(self._each, consume), self._given)

    def _given(self, answers: list[Answer]) -> None:
        rng = self._world.rng
        grants = {
            client: answer.grant
            for client, answer in zip(self._each, answers, strict=True)
            if isinstance(answer, r.Delivered)
        }
        what = 0.5 if self.ending else rng.random()
        if not grants or what < 0.05:  # or it forgets them
            self._pause()
            return
        held_s = clients.ROW_LEASE_S * rng.uniform(0.7, 1.4) if what > 0.85 else 0.03 * rng.random()
        self._world.after(held_s, self._prepare, grants)

    def _prepare(self, grants: dict[Client, int]) -> None:
        asked: dict[Client, Callable[[Client], Any]] = {
            client: lambda client, grant=grant: r.Prepare(
                client=client.name, sequence=client.next_sequence(), grant=grant
            )
            for client, grant in grants.items()
        }
        self._ask(asked, lambda answers: self._prepared(grants, answers))

    def _prepared(self, grants: dict[Client, int], answers: list[Answer]) -> None:
        rng = self._world.rng
        prepared = {
            client: grant
            for (client, grant), answer in zip(grants.items(), answers, strict=True)
            if isinstance(answer, r.Done)
        }
        what = 0.0 if self.ending else rng.random()
        if what > 0.9:
            self._ask(dict.fromkeys(self._each, lambda client: r.Leave(client=client.name, ended=True)), self._dead)
        elif prepared:
            keep = len(prepared) == len(grants) and what < 0.8
            self._world.after(0.8 * rng.random() ** 3, self._conclude, prepared, keep)
        else:
            self._pause()

    def _conclude(self, prepared: dict[Client, int], keep: bool) -> None:
        asked: dict[Client, Callable[[Client], Any]] = {
            client: lambda client, grant=grant: r.Conclude(
                client=client.name, sequence=client.next_sequence(), grant=grant, keep=keep
            )
            for client, grant in prepared.items()
        }
        self._ask(asked, self._concluded)

    def _concluded(self, answers: list[Answer]) -> None:
        if not all(isinstance(answer, r.Done) for answer in answers):
            raise Violation(f"2: what {self.name} has prepared is refused when all have: {answers}")
        self._pause()

    def _dead(self, answers: list[Answer]) -> None:
        """Another of another name goes on."""
        self._lives += 1
        for client in self._each:
            client.name = self.name
        self._pause()

    def _pause(self) -> None:
        self._world.after(0.02 + 0.06 * self._world.rng.random(), self.run)
