"""Kills under load on one host (`tests.chaos.kills`): no row is lost or doubled, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each_case
from tests.chaos.kills import TASKS, Event, Found, judge, run


@pytest.mark.long
@each_case("seed", [1])
def test_40_kills_under_load_lose_no_row_double_none_and_leave_nothing(seed: int, tmp_path: Path) -> None:
    found = run(seed, 40, tmp_path)
    assert found.broken == []
    assert found.kills == 40
    assert found.appended > 100, "they were under load"
    assert found.spilled, "and so was the disk"


def test_the_rules_find_what_is_broken() -> None:
    """Each of them, in a history that breaks it and no other."""

    def broken(*events: tuple[float, str, str, list[int]]) -> list[str]:
        found = Found()
        judge([Event(0.0, "append", "", [1, 2]), *(Event(*event) for event in events)], found)
        return found.broken

    fine = [(1.0, what, task, [1, 2]) for task in TASKS for what in ("deliver", "ack?", "ack")]
    assert broken(*fine) == []
    assert broken(*fine[3:]) == ["'reward': 2 rows lost, as [1, 2]"]
    assert broken(*fine[:5]) == [], "its answer may have been lost"
    assert broken(*fine, (2.0, "ack", "actor", [2])) == ["'actor': 1 rows acked twice, as [2]"]
    assert broken(*fine, (9.0, "deliver", "actor", [1])) == ["'actor': 1 rows delivered after its ack, as [1]"]
    assert broken(*fine, (1.0, "wrong", "actor", [1])) == ["'actor' saw other columns than those of [1]"]
