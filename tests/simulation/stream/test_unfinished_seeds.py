"""Rows in progress, simulated: pieces are there once and in order, by one holder at a time, and nothing is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.unfinished import UnfinishedRowsTable
from tests.cases import each_case
from tests.simulation.faults import Plan
from tests.simulation.planted import Plant
from tests.simulation.run import Outcome, outcome
from tests.simulation.shrink import report
from tests.simulation.stream.bringers import Bringer
from tests.simulation.stream.run import Run, plan

SEEDS = 15
LOOK = 8
FIRST = {"any_token_will_do": 44}
"""Where to begin looking; from 0, if it is not said."""


def run(given: Plan) -> Outcome:
    """As a run of the stream's, with two that bring rows piece by piece in each partition."""
    made = Run(given)
    for partition in made.partitions:
        partition.bringers += [
            Bringer(made.world, number, given.nodes, partition.ask, made.stored, partition.number) for number in (1, 2)
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
