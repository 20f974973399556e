"""Each fault that is planted in the state machine of a table is found by few seeds from the first that is given."""

from __future__ import annotations

import pytest

from tests.simulation.table.planted import FAULTS
from tests.simulation.table.run import run_seed

SEEDS = 60

#: Those that are looked for in every run of the tests.
FEW = {"a_row_is_taken_twice", "a_failover_loses_entries"}

#: Where to begin looking, if not at 0.
FIRST = {
    "a_snapshot_lacks_the_next_number": 9,
    "a_snapshot_lacks_the_sequences": 200,
    "entries_are_numbered_anew": 7,
    "what_is_refused_has_changed_something": 60,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in FEW)) for name in FAULTS])
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch.setattr)
    first = FIRST.get(name, 0)
    assert any(run_seed(seed).broken is not None for seed in range(first, first + SEEDS))
