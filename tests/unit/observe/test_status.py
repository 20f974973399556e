from __future__ import annotations

from dataplane.observe.status import status_text
from tests.unit.observe.figures import stats, stream


def test_the_streams_are_shown() -> None:
    lines = status_text(stats()).splitlines()
    assert "stream    rollouts: 1,500 of 4,096 rows, 1.0 GiB of 2.0 GiB, oldest 1 min 5 s, version 7" in lines
    assert "            reward: 500 pending, 0 leased, 4,500 acked" in lines
    assert "            actor: 1,200 pending, 300 leased, 3,500 acked" in lines
    assert not any("wait for" in line or "waits for" in line for line in lines)


def test_names_are_not_obeyed_by_the_terminal() -> None:
    text = status_text(stats(streams={"\x1b[2Jname\n": stream()}))
    assert "?[2Jname?: 1,500" in text
    assert text.replace("\n", "").isprintable()
