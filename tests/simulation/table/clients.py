"""Writers, takers and readers: each does one thing at a time, and asks until it has an answer that settles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.errors import DataplaneError, Lost, Misuse, Rejected
from dataplane.stream import requests as s
from dataplane.stream.requests import CommandRefused
from dataplane.table import requests as r
from tests.simulation import clients
from tests.simulation.table.columns import Columns
from tests.simulation.table.machine import decoded_result, stored
from tests.simulation.table.model import COLUMNS
from tests.simulation.world import World

KEYS = [f"k{number}" for number in range(12)]
TASKS = ("train", "score")
_FINAL = (Rejected, Misuse, Lost)


class Call(clients.Call):
    __slots__ = ()

    def encode(self) -> bytes:
        return r.encode_request(self.request)

    def _again(self) -> None:
        self.send()

    def answered(self, outcome: bytes | DataplaneError) -> None:
        if self._done:
            return
        answer: Any = outcome
        if isinstance(outcome, bytes):
            answer = decoded_result(outcome) if outcome else None
        if isinstance(answer, CommandRefused):
            answer = answer.error
        if not isinstance(answer, DataplaneError) or isinstance(answer, _FINAL):
            self._end(answer)
        else:
            self._refused(answer)


class Client(clients.Client):
    CALL = Call

    def do(self, kind: type[r.StreamRequest], then: Callable[[Any], None], **fields: Any) -> None:
        """Ask for a change, under the next sequence."""
        self.call(kind(client=self.name, sequence=self.next_sequence(), **fields), then)


class Writer(Client):
    """Writes a few rows, and clears some; now and then it drops the table."""

    def __init__(self, world: World, name: str, nodes: int, ask: Callable[[int, Call], None], columns: Columns) -> None:
        super().__init__(world, name, nodes, ask)
        self._columns = columns

    def run(self) -> None:
        if self.ending:
            return
        rng, what = self.world.rng, self.world.rng.random()
        keys = rng.sample(KEYS, rng.randint(1, 3))
        if what < 0.02:
            self.do(r.DropTable, self._done)
        elif what < 0.25:
            self.do(r.ClearRows, self._done, keys=keys)
        else:
            tags = [{rng.choice("ab"): rng.randrange(9)} for _ in keys] if rng.random() < 0.5 else []
            names = rng.sample(COLUMNS, rng.randint(0, len(COLUMNS)))
            if not names:
                self.do(r.Upsert, self._done, keys=keys, tags=tags)
                return
            life, shard, _ = self._columns.store(rng, 0)
            ref = stored(life, shard, len(keys), names)
            self.do(r.Upsert, lambda answer: self._wrote(ref, answer), keys=keys, ref=ref.encode(), tags=tags)

    def _wrote(self, ref: Any, answer: Any) -> None:
        if isinstance(answer, DataplaneError):
            assert isinstance(answer, Lost), answer  # the node that stored it
            self._columns.forget(0, ref, ())
        self._done(answer)

    def _done(self, answer: Any) -> None:
        self.world.after(0.005 + 0.09 * self.world.rng.random(), self.run)


class Taker(Client):
    """Takes rows of a task that are ready, some under a claim that others make too, and gives some back."""

    def run(self) -> None:
        if self.ending:
            return
        self._task = self.world.rng.choice(TASKS)
        self._claim = f"c{self.world.rng.randrange(20)}" if self.world.rng.random() < 0.3 else ""
        self.call(r.FindReady(columns=["x"], task=self._task, claim_id=self._claim), self._shown)

    def _shown(self, answer: r.RowNumbers | None) -> None:
        if answer is None:
            self._again()
            return
        rng = self.world.rng
        rows = answer.rows.tolist()
        chosen = np.array(rng.sample(rows, min(len(rows), rng.randint(1, 2))), np.int64)
        self.do(r.Claim, self._given, task=self._task, rows=chosen, give=chosen, claim_id=self._claim)

    def _given(self, answer: r.ClaimedRows) -> None:
        if isinstance(answer, r.ClaimedRows) and answer.granted and self.world.rng.random() < 0.3:
            self.do(r.Release, self._again, task=self._task, rows=answer.rows)
        else:
            self._again()

    def _again(self, answer: Any = None) -> None:
        self.world.after(0.01 + 0.08 * self.world.rng.random(), self.run)


class Reader(Client):
    def run(self) -> None:
        if not self.ending:
            self.call(r.LookRows(all=True, columns=list(COLUMNS)), self._seen)

    def _seen(self, answer: Any) -> None:
        assert isinstance(answer, r.Looked), answer
        self.world.after(0.01 + 0.05 * self.world.rng.random(), self.run)


class Mourner(Client):
    def tell(self, node: bytes) -> None:
        self.call(s.Lose(node=node), lambda answer: None)
