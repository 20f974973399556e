"""Each fault that is planted in the protocol is found within a thousand seeds."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.simulation.planted import FAULTS
from tests.simulation.run import run_seed

SEEDS = 1000

#: Those that are looked for in every run of the tests.
FEW = {
    "a_follower_acks_before_it_has_appended",
    "a_leader_ignores_its_lease",
    "an_old_epoch_is_accepted",
    "a_part_is_taken_for_the_snapshot",
}

#: Where to begin looking, for those that few seeds find.
NEAR = {
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
}


@pytest.mark.timeout(300)  # of a machine with much else to do; a thousand seeds are 15 s of its processor
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in FEW)) for name in FAULTS])
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch.setattr)
    near = NEAR.get(name, 0)
    found = (seed for seed in chain(range(near, SEEDS), range(near)) if run_seed(seed).broken is not None)
    assert next(found, None) is not None


def test_none_is_left_behind() -> None:
    assert run_seed(0).broken is None
