"""Kills under load on one host (`tests.chaos.kills`): no row is lost or doubled, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each_case
from tests.chaos.history import Event, History
from tests.chaos.kills import TASKS, run


@pytest.mark.long
@each_case("seed", [1])
def test_forty_kills_under_load_neither_lose_nor_duplicate_rows(seed: int, tmp_path: Path) -> None:
    found = run(seed, 40, tmp_path)
    assert found.broken == []
    assert found.kills == 40
    assert found.appended > 100, "they were under load"
    assert found.spilled, "and so was the disk"


def test_each_rule_of_a_history_detects_its_violation() -> None:
    def broken(*events: tuple[str, list[int], str, float]) -> list[str]:
        history = History(TASKS, [Event("append", (1, 2), "", 0.0, 1.0)])
        for what, rows, task, began in events:
            history.events.append(Event(what, tuple(rows), task, began, began + 1.0))
        return [each.splitlines()[0] for each in history.broken()]

    fine = [("ack", [1, 2], task, 0.0) for task in TASKS]
    assert broken(*fine) == []
    assert broken(*fine[1:]) == ["2 rows were never acked by 'reward': [1, 2]"]
    assert broken(*fine, ("ack", [2], "actor", 0.0)) == ["1 rows were acked twice by 'actor': [2]"]
    assert broken(*fine, ("deliver", [1], "actor", 0.0)) == []
    again = ["1 rows were delivered again to 'actor' after it had acked them: [1]"]
    assert broken(*fine, ("deliver", [1], "actor", 60.0)) == again
