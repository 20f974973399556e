"""Clients that bring rows piece by piece: they begin some, take up what others left, finish some, drop some, and leave
or keep some too long, as who dies does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.stream import requests as r
from dataplane.stream.pieces import RowPiece
from tests.simulation import clients
from tests.simulation.stream.clients import Answer, Call, Client
from tests.simulation.stream.columns import Columns
from tests.simulation.stream.machine import LABEL, columns, versions
from tests.simulation.world import World

_INTS = Field("ragged", "int64", (None,))
_TOKENS = 1 << 32  # of one client


class Bringer(Client):
    """See the module."""

    def __init__(
        self,
        world: World,
        number: int,
        nodes: int,
        ask: Callable[[int, Call], None],
        stored: Columns,
        partition: int,
    ) -> None:
        super().__init__(world, f"b{number}", nodes, ask)
        self._stored = stored
        self._partition = partition
        self._token = number * _TOKENS

    def run(self) -> None:
        self._token += 1
        token, sequence = self._token, self.next_sequence()
        if self.ending or self.world.rng.random() < 0.5:
            take = r.ResumeRow(client=self.name, sequence=sequence, row=-1, token=token, lease_s=clients.ROW_LEASE_S)
            self.call(take, lambda answer: self._taken(token, answer))
            return
        node, shard, copies = self._stored.store(self.world.rng, self._partition)
        begin = r.Append(
            client=self.name,
            sequence=sequence,
            ref=columns(node, shard, 1, "x"),
            versions=versions(1),
            tags={LABEL: [f"{self.name}-{sequence}"]},
            nodes=copies,
            begin=(token, clients.ROW_LEASE_S, "y"),
        )
        self.call(begin, lambda answer: self._begun(begin, token, answer))

    def _begun(self, begin: r.Append, token: int, answer: Answer) -> None:
        if isinstance(answer, r.AppendResult):
            self._go_on(answer.first, token, 0)
        else:
            self._stored.forget(self._partition, begin.ref, begin.nodes)
            self._pause()

    def _taken(self, token: int, answer: Answer) -> None:
        if isinstance(answer, r.UnfinishedRows) and answer.rows:
            self._go_on(answer.rows[0].row, token, answer.rows[0].pieces)
        else:
            self._pause()

    def _go_on(self, row: int, token: int, pieces: int) -> None:
        rng = self.world.rng
        what = 0.7 if self.ending else rng.random()
        if what < 0.08:
            self._pause()  # forgets it
        elif what < 0.15:
            give_up = r.AbandonRow(client=self.name, sequence=self.next_sequence(), row=row, token=token)
            self.call(give_up, lambda answer: self._pause())
        else:
            late_s = clients.ROW_LEASE_S * rng.uniform(0.7, 1.4) if what < 0.25 else 0.03 * rng.random()
            self.world.after(late_s, self._grow, row, token, pieces, what > 0.65)

    def _grow(self, row: int, token: int, pieces: int, last: bool) -> None:
        node, shard, copies = self._stored.store(self.world.rng, self._partition)
        request = r.ExtendRow(
            client=self.name,
            sequence=self.next_sequence(),
            row=row,
            piece=RowPiece(token, pieces, 0, last, shard),
            ref=ref_to(node, 1, [("y", _INTS, 8, shard, 0)]),
            lengths={"y": np.ones(1, np.int64)},
            nodes=copies,
        )
        self.call(request, lambda answer: self._grown(request, answer))

    def _grown(self, request: r.ExtendRow, answer: Answer) -> None:
        if not isinstance(answer, r.AppendResult) or not answer.new:
            self._stored.forget(self._partition, request.ref, request.nodes)
            self._pause()
        elif request.piece.last:
            self._pause()
        else:
            self._go_on(request.row, request.piece.token, request.piece.number + 1)

    def _pause(self) -> None:
        self.world.after(0.02 + 0.1 * self.world.rng.random(), self.run)
