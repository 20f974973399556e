from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dataplane.observe.status import status_text
from dataplane.observe.top import frame
from tests.cases import each_case
from tests.unit.observe.figures import GIB, stats, stream, task


def drawn(*args: object, width: int = 120, height: int = 60) -> list[str]:
    return frame(*args, width, height).splitlines()  # type: ignore[arg-type]


def row(lines: list[str], name: str) -> list[str]:
    [line] = [line for line in lines if line.split()[:1] == [name]]
    return line.split()[1:]


def test_rates_are_computed_from_changes_since_the_last_sample() -> None:
    before = stats(put_bytes=GIB)
    tasks = {"reward": task(acked=4700), "actor": task(acked=3500)}
    after = stats(put_bytes=5 * GIB, streams={"rollouts": stream(appended=5400, task=tasks)})
    lines = drawn(after, before, 2.0)
    assert row(lines, "bytes") == ["put", "2.0", "GiB/s", "spilled", "0", "B/s", "restored", "0", "B/s"]
    assert row(lines, "rollouts:")[-3:] == ["200", "rows/s", "in"]
    assert row(lines, "reward") == ["0", "0", "4,700", "100", "0", "0"]
    assert row(lines, "actor") == ["0", "0", "3,500", "0", "0", "0"]


@each_case("name", ["\x1b]0;x\x07", "a\nb", "名前" * 40, "e\u0301" * 90])
def test_unusual_names_do_not_break_the_display(name: str) -> None:
    figures = stats(streams={name: stream(task={name: task()})}, holders=({"holder": name, "bytes": 1, "how": "x"},))
    plain = drawn(replace(figures, streams={"x": stream(task={"x": task()})}), None, 0.0, width=60)
    lines = drawn(figures, None, 0.0, width=60)
    assert len(lines) == len(plain)
    assert all(line.isprintable() for line in lines)
    assert all(sum(2 if c in "名前" else c != "\u0301" for c in line) <= 60 for line in lines)


@given(width=st.integers(1, 200), height=st.integers(1, 50))
def test_the_display_fits_any_terminal_size(width: int, height: int) -> None:
    lines = drawn(stats(), stats(), 1.0, width=width, height=height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


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
