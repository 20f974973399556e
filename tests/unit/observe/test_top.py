from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dataplane.observe.top import frame
from tests.cases import each_case
from tests.unit.observe.figures import GIB, stats, stream, task


def drawn(*args: object, width: int = 120, height: int = 60) -> list[str]:
    return frame(*args, width, height).splitlines()  # type: ignore[arg-type]


def row(lines: list[str], name: str) -> list[str]:
    [line] = [line for line in lines if line.split()[:1] == [name]]
    return line.split()[1:]


def test_rates_are_of_what_changed_since() -> None:
    before = stats(put_bytes=GIB)
    tasks = {"reward": task(acked=4700), "actor": task(acked=3500)}
    after = stats(put_bytes=5 * GIB, streams={"rollouts": stream(appended=5400, task=tasks)})
    lines = drawn(after, before, 2.0)
    assert row(lines, "bytes") == ["put", "2.0", "GiB/s", "spilled", "0", "B/s", "restored", "0", "B/s"]
    assert row(lines, "rollouts:")[-3:] == ["200", "rows/s", "in"]
    assert row(lines, "reward") == ["0", "0", "4,700", "100", "0", "0"]
    assert row(lines, "actor") == ["0", "0", "3,500", "0", "0", "0"]


def test_a_stream_that_began_anew_has_no_negative_rate() -> None:
    after = stats(streams={"rollouts": stream(appended=3, task={"actor": task(acked=1), "new": task()})})
    lines = drawn(after, stats(), 1.0)
    assert row(lines, "rollouts:")[-3:] == ["0", "rows/s", "in"]
    assert row(lines, "actor")[3] == "0"
    assert len(row(lines, "new")) == 5


def test_who_waits_for_what() -> None:
    tasks = {"actor": task(waiting=1, ready={"ids": 0})}
    figures = stats(waiting=2, waiting_bytes=GIB, streams={"s": stream(waiting=3, behind=["actor"], task=tasks)})
    lines = drawn(figures, None, 0.0)
    start = lines.index("who waits for what")
    assert lines[start + 1 : start + 4] == [
        "  memory: 2 requests for 1.0 GiB",
        "  s: 3 appends wait for room, made by actor",
        "  s: 1 consumer of actor waits for ids (0 rows ready)",
    ]
    assert "who waits for what" not in drawn(stats(), None, 0.0)


def test_what_does_not_fit_is_counted() -> None:
    streams = {f"s{i}": stream() for i in range(20)}
    everything = drawn(stats(streams=streams), None, 0.0, height=1000)
    lines = drawn(stats(streams=streams), None, 0.0, height=10)
    assert lines[:9] == everything[:9]
    assert lines[9] == f"... and {len(everything) - 9} lines more"


@each_case("name", ["\x1b]0;x\x07", "a\nb", "名前" * 40, "e\u0301" * 90])
def test_no_name_breaks_the_picture(name: str) -> None:
    figures = stats(streams={name: stream(task={name: task()})}, holders=({"holder": name, "bytes": 1, "how": "x"},))
    plain = drawn(replace(figures, streams={"x": stream(task={"x": task()})}), None, 0.0, width=60)
    lines = drawn(figures, None, 0.0, width=60)
    assert len(lines) == len(plain)
    assert all(line.isprintable() for line in lines)
    assert all(sum(2 if c in "名前" else c != "\u0301" for c in line) <= 60 for line in lines)


@given(width=st.integers(1, 200), height=st.integers(1, 50))
def test_it_fits_any_terminal(width: int, height: int) -> None:
    lines = drawn(stats(), stats(), 1.0, width=width, height=height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
