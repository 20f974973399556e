"""Each fault that is planted in the stream's state machine is found by few seeds from the first that is given here."""

from __future__ import annotations

import pytest

from tests.simulation.stream.planted import FAULTS
from tests.simulation.stream.run import partitions, run_seed

SEEDS = 60

#: Those that are looked for in every run of the tests.
FEW = {"a_key_has_two_rows", "an_ack_of_a_superseded_lease_is_taken"}

#: Where to begin looking.
FIRST = {
    "a_command_is_done_twice": 2,
    "a_copy_is_not_told": 0,
    "a_copy_is_taken_for_none": 1,
    "a_dropped_row_goes_where_nobody_holds_it": 0,
    "a_failover_gives_what_is_prepared": 0,
    "a_failover_keeps_rows_leased": 51,
    "a_failover_keeps_the_leases_of_before": 1,
    "a_failover_shows_what_is_held_back": 90,
    "a_group_is_given_before_it_is_whole": 0,
    "a_key_has_two_rows": 0,
    "a_loan_keeps_what_it_was_decided_with": 88,
    "a_lost_row_is_named_twice": 1,
    "a_lost_row_is_not_named": 1,
    "a_nack_forgets_the_count": 1,
    "a_prepared_row_is_lost_with_its_columns": 65,
    "a_quota_is_given_back_while_it_is_used": 600,
    "a_quota_is_lent_twice": 5,
    "a_row_that_lost_its_columns_while_it_was_prepared_stays": 187,
    "a_snapshot_lacks_the_count_of_deliveries": 79,
    "a_snapshot_lacks_the_keys": 40,
    "a_snapshot_lacks_what_is_held_back": 78,
    "a_snapshot_lacks_what_is_lost": 1,
    "a_snapshot_lacks_what_is_prepared": 0,
    "a_snapshot_lacks_what_was_dropped": 10,
    "an_ack_of_a_superseded_lease_is_taken": 0,
    "an_entry_is_lost_with_its_leader": 8,
    "columns_of_an_old_holder_are_taken": 0,
    "columns_that_came_before_are_told": 0,
    "entries_are_numbered_anew": 0,
    "limits_forget_what_is_on_its_way": 145,
    "rows_on_their_way_are_given_again": 1,
    "what_another_partition_refuses_counts": 0,
    "what_another_partition_refuses_stays": 6,
    "what_is_released_is_leased_to_nobody": 10,
    "who_has_ended_keeps_what_it_has_prepared": 0,
    "who_is_told_twice_frees_twice": 0,
}

#: Those that only runs with several partitions can find: they alone are run.
LENT = {
    "a_loan_keeps_what_it_was_decided_with",
    "a_quota_is_given_back_while_it_is_used",
    "a_quota_is_lent_twice",
}


@pytest.mark.timeout(300)  # of a machine with much else to do; all of its seeds are 4 s of a processor
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in FEW)) for name in FAULTS])
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch.setattr)
    seeds = (s for s in range(FIRST[name], FIRST[name] + SEEDS) if name not in LENT or partitions(s) > 1)
    assert any(run_seed(seed).broken is not None for seed in seeds)
