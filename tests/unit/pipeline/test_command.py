"""`dataplane plan`, and the pictures that it shows."""

from __future__ import annotations

import multiprocessing
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataplane import cli
from dataplane.pipeline import Pipeline, Rows, Stage, crews
from dataplane.pipeline.functions import Functions
from tests.cases import each_case

SHORT = ["--workers", "2", "--micro-batches", "2", "--seconds", "0.2"]


def test_the_plan_command_shows_its_plan_beside_the_usual_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", "llama3_8b", *SHORT, "--svg", str(picture), "--width", "40"]) == 0
    out = capsys.readouterr().out
    assert "planned: " in out
    assert "usual: interleaved 1F1B" in out
    assert "x the usual plan's pace" in out
    lines = [line for line in out.splitlines() if line.startswith(("  0 ", "  1 "))]
    assert [len(line) for line in lines] == [44] * 4
    drawn = ET.fromstring(picture.read_text())
    assert len(drawn.findall(".//{*}title")) > 30, "each instruction tells what it is"


def no_rows() -> tuple[Pipeline, Rows]:
    return free()[0], Rows.of([])


def free() -> tuple[Pipeline, Rows]:
    return Pipeline([Stage("a", inputs=("x",), outputs=("y",))]), Rows.of([1] * 4)


def test_a_plan_of_stages_without_cost_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", "tests.unit.pipeline.test_command:free", *SHORT, "--svg", str(picture)]) == 0
    assert "1.00 x the usual plan's pace" in capsys.readouterr().out
    ET.fromstring(picture.read_text())


@each_case(
    ("arguments", "said"),
    [
        (["nobody"], "none of llama3_8b"),
        (["llama3_8b", "--workers", "99"], "32 layers, and there are 99 workers"),
        (["llama3_8b", "--workers", "0"], "1 or more"),
        (["llama3_8b", "--micro-batches", "0"], "--micro-batches is 1 or more, not 0"),
        (["llama3_8b", "--tokens", "0"], "--tokens is 1 or more, not 0"),
        (["tests.unit.pipeline.test_command:no_rows"], "a row or more"),
        (["nowhere:thing"], "nowhere"),
        (["tests.unit.pipeline.test_command:SHORT"], "no Model"),
    ],
)
def test_invalid_arguments_of_the_plan_command_are_reported(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Workers that are processes.


class Clock:
    """A clock that only waits advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Busy:
    """A process that ends only when it is killed."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.killed = clock, False

    def join(self, timeout: float | None = None) -> None:
        if not self.killed:
            assert timeout is not None, "it would wait for ever"
            self.clock.now += timeout

    def is_alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        assert self.killed


def test_all_workers_that_do_not_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(crews, "time", SimpleNamespace(monotonic=clock.monotonic), raising=False)
    crew = crews.Processes(Functions())
    busy = [Busy(clock) for _ in range(3)]
    for w, each in enumerate(busy):
        ours, theirs = multiprocessing.Pipe()
        theirs.close()
        crew._processes[w] = (each, ours)
        crew._selector.register(ours, crews.selectors.EVENT_READ, w)
    crew.close()
    assert all(each.killed for each in busy)
    assert clock.now == crews.STOP_S
