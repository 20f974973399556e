"""Each fault that is planted in the stream's state machine is found by few seeds from the first that is given here."""

from __future__ import annotations

import pytest

from tests.simulation.stream.planted import FAULTS
from tests.simulation.stream.run import run_seed

SEEDS = 60

#: Those that are looked for in every run of the tests.
FEW = {"a_key_has_two_rows", "an_ack_of_a_superseded_lease_is_taken"}

#: Where to begin looking.
FIRST = {
    "a_command_is_done_twice": 2,
    "a_copy_is_not_told": 0,
    "a_copy_is_taken_for_none": 1,
    "a_dropped_row_goes_where_nobody_holds_it": 0,
    "a_failover_keeps_rows_leased": 170,
    "a_failover_keeps_the_leases_of_before": 1,
    "a_group_is_given_before_it_is_whole": 0,
    "a_key_has_two_rows": 0,
    "a_lost_row_is_named_twice": 1,
    "a_lost_row_is_not_named": 1,
    "a_nack_forgets_the_count": 1,
    "a_snapshot_lacks_the_count_of_deliveries": 79,
    "a_snapshot_lacks_the_keys": 40,
    "a_snapshot_lacks_what_is_lost": 1,
    "a_snapshot_lacks_what_was_dropped": 10,
    "an_ack_of_a_superseded_lease_is_taken": 0,
    "an_entry_is_lost_with_its_leader": 8,
    "appends_that_came_together_are_made_again": 6,
    "columns_of_an_old_holder_are_taken": 0,
    "columns_that_came_before_are_told": 0,
    "entries_are_numbered_anew": 0,
    "limits_forget_what_is_on_its_way": 145,
    "rows_on_their_way_are_given_again": 1,
    "who_is_told_twice_frees_twice": 0,
}


@pytest.mark.timeout(300)  # of a machine with much else to do; all of its seeds are 4 s of a processor
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in FEW)) for name in FAULTS])
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch.setattr)
    seeds = range(FIRST[name], FIRST[name] + SEEDS)
    assert any(run_seed(seed).broken is not None for seed in seeds)
