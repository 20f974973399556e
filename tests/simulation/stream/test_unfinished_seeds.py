"""Rows in progress, simulated: pieces are there once and in order, by one holder at a time, and nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.stream import requests as r
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.pieces import RowPiece
from dataplane.stream.unfinished import UnfinishedRowsTable
from tests.cases import each_case
from tests.simulation import clients
from tests.simulation.faults import Plan
from tests.simulation.planted import Plant
from tests.simulation.run import Outcome, outcome
from tests.simulation.shrink import report
from tests.simulation.stream.clients import Answer, StoringClient
from tests.simulation.stream.machine import LABEL, columns, versions
from tests.simulation.stream.run import Run, plan

_INTS = Field("ragged", "int64", (None,))
_TOKENS = 1 << 32  # of one client


class Bringer(StoringClient):
    """See the module. `number`: of this client, from 1."""

    def __init__(self, *storing: Any, number: int) -> None:
        super().__init__(*storing)
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


SEEDS = 15
LOOK = 8
FIRST = {"any_token_will_do": 44}
"""Where to begin looking; from 0, if it is not said."""


def run(given: Plan) -> Outcome:
    """As a run of the stream's, with two that bring rows piece by piece in each partition."""
    made = Run(given)
    for partition in made.partitions:
        partition.bringers += [
            Bringer(made.world, f"b{number}", given.nodes, partition.ask, made.stored, partition.number, number=number)
            for number in (1, 2)
        ]
    return outcome(made)


@pytest.mark.timeout(300)  # of a machine with much else to do; alone, it takes 2 s
def test_every_invariant_holds() -> None:
    outcomes = [run(plan(seed)) for seed in range(SEEDS)]
    broken = [each for each in outcomes if each.broken is not None]
    assert not broken, "\n".join(report(each, run, "test_unfinished_seeds") for each in broken[:3])
    assert sum(each.commands for each in outcomes) > 60 * SEEDS


def any_token_will_do(plant: Plant) -> None:
    require = UnfinishedRowsTable.require
    plant(UnfinishedRowsTable, "require", lambda self, row, *tokens: self.begun.get(row) or require(self, row, *tokens))


def a_row_is_given_before_it_is_finished(plant: Plant) -> None:
    plant(UnfinishedRowsTable, "hide", lambda self, row: show(self, row))
    hide = UnfinishedRowsTable.hide

    def show(self: UnfinishedRowsTable, row: int) -> None:
        page, inside = self.rows.place(row)
        columns = page.columns[inside]
        hide(self, row)
        page.columns[inside] = columns


def a_snapshot_lacks_what_is_in_progress(plant: Plant) -> None:
    plant(UnfinishedRowsTable, "state", lambda self, rows: [])


def a_piece_is_let_go_with_the_first(plant: Plant) -> None:
    plant(ColumnBatch, "each", property(lambda self: self.pieces[:1] or (self,)))


FAULTS: list[Callable[[Plant], None]] = [
    any_token_will_do,
    a_row_is_given_before_it_is_finished,
    a_snapshot_lacks_what_is_in_progress,
    a_piece_is_let_go_with_the_first,
]


@pytest.mark.timeout(300)
@each_case("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[Plant], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch.setattr)
    first = FIRST.get(fault.__name__, 0)
    assert any(run(plan(seed)).broken is not None for seed in range(first, first + LOOK))
