"""Who waits for whom, and for what."""

from __future__ import annotations

from dataplane.web.samples import sample
from dataplane.web.waits import Wait, Waits
from tests.unit.observe.figures import task
from tests.unit.web.looking import A, B, looked, part, stats


def waits_at(at_s: float, waits: Waits, **changed: object) -> list[Wait]:
    return waits.took(sample(looked(at_s, stats(A, **changed), stats(B)), None))


def test_producers_wait_for_the_slowest_task() -> None:
    [wait] = waits_at(0.0, Waits(), streams={"s": part(9, 0, waiting=4, behind=["actor"])})
    assert (wait.who, wait.whom, wait.count, wait.stream) == ("producers", "actor", 4, "s")


def test_consumers_wait_for_who_makes_their_columns() -> None:
    tasks = {"reward": task(leased=8), "actor": task(pending=8, waiting=1, ready={"ids,score": 0})}
    [wait] = waits_at(0.0, Waits(), streams={"s": part(8, 0, task=tasks)})
    assert (wait.who, wait.whom, wait.what) == ("actor", "reward", "ids,score (0 rows ready)")


def test_a_group_is_waited_for_since_its_first_row() -> None:
    groups = [{"group": "p17", "rows": 5, "of": 8, "dropped": 0, "age_s": 90.0}]
    tasks = {"reward": task(), "actor": task(incomplete=groups)}
    [wait] = waits_at(0.0, Waits(), streams={"s": part(5, 0, task=tasks)})
    assert (wait.what, wait.since_s) == ("group p17: 5 of 8 rows are there", 90.0)


def test_requests_wait_for_who_holds_the_memory() -> None:
    holders = ({"holder": "train.py (pid 31)", "bytes": 1 << 20, "how": "pinned"},)
    [wait] = waits_at(0.0, Waits(), waiting=2, waiting_bytes=4096, holders=holders)
    assert wait.whom == "train.py (pid 31) (1.0 MiB pinned)"
    assert wait.what == "4.0 KiB of memory on a:1"


def test_a_wait_that_lasts_says_since_when() -> None:
    waits, stream = Waits(), part(9, 0, waiting=1, behind=["actor"])
    assert [w.since_s for w in waits_at(10.0, waits, streams={"s": stream})] == [0.0]
    assert [w.since_s for w in waits_at(13.0, waits, streams={"s": stream})] == [3.0]
    assert waits_at(14.0, waits) == []
    assert [w.since_s for w in waits_at(15.0, waits, streams={"s": stream})] == [0.0]
