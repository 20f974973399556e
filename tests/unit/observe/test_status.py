from __future__ import annotations

from dataplane.observe.status import status_text
from tests.unit.observe.figures import stats, stream, task


def test_what_crosses_between_hosts_is_shown_where_it_does() -> None:
    assert "hosts" not in status_text(stats())
    text = status_text(stats(fetched_bytes=3 << 20, sent_bytes=1 << 30, copies=7))
    assert "hosts     fetched 3.0 MiB, sent 1.0 GiB, 7 copies" in text


def test_the_streams_are_shown() -> None:
    lines = status_text(stats()).splitlines()
    assert "stream    rollouts: 1,500 of 4,096 rows, 1.0 GiB of 2.0 GiB, oldest 1 min 5 s, version 7" in lines
    assert "            reward: 500 pending, 0 leased, 4,500 acked" in lines
    assert "            actor: 1,200 pending, 300 leased, 3,500 acked" in lines
    assert not any("wait for" in line or "waits for" in line for line in lines)


def test_groups_that_are_waited_for_are_named() -> None:
    group = {"group": "p\n17", "rows": 5, "dropped": 1, "of": 8, "age_s": 90.0}
    text = status_text(stats(streams={"s": stream(task={"actor": task(incomplete=[group] * 5)})}))
    assert text.count("actor waits for the group 'p\\n17' since 1 min 30 s: 5 of 8 rows, 1 dropped") == 3


def test_names_are_not_obeyed_by_the_terminal() -> None:
    text = status_text(stats(streams={"\x1b[2Jname\n": stream()}))
    assert "?[2Jname?: 1,500" in text
    assert text.replace("\n", "").isprintable()


def test_tables_are_shown_and_the_others_counted() -> None:
    table = {"rows": 1024, "bytes": 3 << 20, "columns": ["x"], "tasks": []}
    text = status_text(stats(tables={"train": table}, tables_in_all=3))
    assert "table     train: 1,024 rows, 3.0 MiB" in text
    assert "tables    2 more" in text
