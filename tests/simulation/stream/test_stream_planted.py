"""Each fault that is planted in the stream's state machine is found by few seeds from the first that is given here."""

from __future__ import annotations

import pytest

from tests.simulation.stream.planted import FAULTS
from tests.simulation.stream.run import partitions, run_seed

SEEDS = 60

#: Where to begin looking.
FIRST = {
    "a_command_is_done_twice": 0,
    "a_copy_is_taken_for_none": 11,
    "a_dropped_row_goes_where_nobody_holds_it": 2,
    "a_failover_keeps_rows_leased": 71,
    "a_failover_keeps_the_leases_of_before": 0,
    "a_group_is_given_before_it_is_whole": 0,
    "a_key_has_two_rows": 0,
    "a_lost_row_is_named_twice": 1,
    "a_lost_row_is_not_named": 1,
    "a_nack_forgets_the_count": 2,
    "a_quota_is_given_back_while_it_is_used": 842,
    "a_quota_is_lent_twice": 5,
    "a_snapshot_lacks_the_count_of_deliveries": 2,
    "a_snapshot_lacks_the_keys": 0,
    "a_snapshot_lacks_what_is_lost": 12,
    "a_snapshot_lacks_what_was_dropped": 63,
    "an_ack_of_a_superseded_lease_is_taken": 0,
    "columns_of_an_old_holder_are_taken": 6,
    "limits_forget_what_is_on_its_way": 45,
    "rows_on_their_way_are_given_again": 0,
}

#: Those that only runs with two partitions can find: they alone are run.
LENT = {"a_quota_is_lent_twice", "a_quota_is_given_back_while_it_is_used"}


@pytest.mark.timeout(300)  # of a machine with much else to do; all of its seeds are 4 s of a processor
@pytest.mark.parametrize("name", FAULTS)
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch.setattr)
    seeds = (s for s in range(FIRST[name], FIRST[name] + SEEDS) if name not in LENT or partitions(s) == 2)
    assert any(run_seed(seed).broken is not None for seed in seeds)
