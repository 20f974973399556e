"""`dataplane plan`, and the pictures that it shows."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dataplane import cli
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


@each_case(
    ("arguments", "said"),
    [
        (["nobody"], "none of llama3_8b"),
        (["llama3_8b", "--workers", "99"], "32 layers, and there are 99 workers"),
        (["llama3_8b", "--workers", "0"], "1 or more"),
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
