from __future__ import annotations

from dataplane.observe.status import status_text
from tests.unit.observe.figures import stats, stream, task


def test_control_characters_in_stream_names_are_escaped() -> None:
    text = status_text(stats(streams={"\x1b[2Jname\n": stream()}))
    assert "?[2Jname?: 1,500" in text
    assert text.replace("\n", "").isprintable()


def test_dead_letters_rows_in_progress_and_the_processes_that_wait_are_shown() -> None:
    rows = stream(unfinished=2, task={"reward": task(dead=1), "actor": task()})
    text = status_text(stats(streams={"rollouts": rows}, waiting=1, waiting_bytes=2 << 20, waiters=("train.py (31)",)))
    assert "2 in progress" in text
    assert "dead letters: stream.dead_letters('reward')" in text
    assert "1 request for 2.0 MiB, of train.py (31)" in text


def test_durable_columns_on_disk_are_explained_where_spilling_is_off() -> None:
    assert "spilling is off; durable columns are in the data directory" in status_text(
        stats(disk_budget=0, spilled_shards=1)
    )
