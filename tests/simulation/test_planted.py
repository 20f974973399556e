"""Each fault that is planted is found: in the protocol within a thousand seeds, in the state machines of streams and
tables by few from the first that is given here."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.simulation import planted, run
from tests.simulation.stream import planted as stream_planted
from tests.simulation.stream import run as stream
from tests.simulation.table import planted as table_planted
from tests.simulation.table import run as table

SEEDS = 1000
SOME = 60

KINDS = {
    "protocol": (planted.FAULTS, run.run_seed, SEEDS),
    "stream": (stream_planted.FAULTS, stream.run_seed, SOME),
    "table": (table_planted.FAULTS, table.run_seed, SOME),
}

#: Those that are looked for in every run of the tests.
FEW = {
    "a_follower_acks_before_it_has_appended",
    "a_leader_ignores_its_lease",
    "an_old_epoch_is_accepted",
    "a_part_is_taken_for_the_snapshot",
    "a_key_has_two_rows",
    "an_ack_of_a_superseded_lease_is_taken (stream)",
    "a_row_is_taken_twice",
    "a_failover_loses_entries",
}

#: Where to begin looking, for those that few seeds find.
NEAR = {
    "protocol": {
        "a_grace_that_forgets_drift": 35,
        "a_recruit_is_promoted_that_was_not_in_sync": 65,
        "a_restarted_leader_keeps_its_epoch": 20,
        "a_sync_is_skipped": 15,
        "a_leader_does_not_wait_for_its_own_disk": 50,
        "a_follower_acks_more_than_it_compared": 180,
        "a_new_leader_does_not_keep_its_promise": 375,
        "a_change_that_may_have_happened_is_not_counted": 10,
        "an_old_epoch_is_accepted": 90,
        "reconciliation_is_skipped": 975,
        "a_late_word_of_a_death_counts_for_the_process_after_it": 440,
        "a_leader_without_its_lease_tells_a_coordinator_that_was_wiped": 240,
    },
    "stream": {
        "a_command_is_done_twice": 2,
        "a_failover_keeps_rows_leased": 170,
        "a_snapshot_lacks_the_count_of_deliveries": 79,
        "a_snapshot_lacks_the_keys": 40,
        "a_snapshot_lacks_what_was_dropped": 10,
        "an_entry_is_lost_with_its_leader": 8,
        "appends_that_came_together_are_made_again": 6,
        "limits_forget_what_is_on_its_way": 145,
    },
    "table": {
        "a_snapshot_lacks_the_next_number": 9,
        "a_snapshot_lacks_the_sequences": 200,
        "entries_are_numbered_anew": 7,
        "what_is_refused_has_changed_something": 60,
    },
}

ALL = [
    pytest.param(kind, name, marks=[pytest.mark.long] * (not {name, f"{name} ({kind})"} & FEW))
    for kind, (faults, _, _) in KINDS.items()
    for name in faults
]


@pytest.mark.timeout(300)  # of a machine with much else to do; a thousand seeds are 15 s of its processor
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_each_planted_fault_is_detected(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, run_seed, seeds = KINDS[kind]
    faults[name](monkeypatch.setattr)
    near = NEAR[kind].get(name, 0)
    tried = chain(range(near, SEEDS), range(near)) if kind == "protocol" else range(near, near + seeds)
    assert any(run_seed(seed).broken is not None for seed in tried)


def test_no_planted_fault_remains_after_its_test() -> None:
    assert run.run_seed(0).broken is None
