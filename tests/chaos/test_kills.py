"""Kills under load on one host (`tests.chaos.kills`): no row is lost or doubled, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each_case
from tests.chaos.kills import run


@pytest.mark.long
@each_case("seed", [1])
def test_40_kills_under_load_lose_no_row_double_none_and_leave_nothing(seed: int, tmp_path: Path) -> None:
    found = run(seed, 40, tmp_path)
    assert found.broken == []
    assert found.kills == 40
    assert found.appended > 100, "they were under load"
    assert found.spilled, "and so was the disk"
