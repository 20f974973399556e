"""`python -m bench.workloads TASK`."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.workloads import TASKS, generate, read, summary
from bench.workloads.__main__ import main
from tests.cases import each_case


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


@each_case("name", TASKS)
def test_a_task_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, name, "--prompts", "20", "--samples", "4", "--steps", "3", "--scale", "0.5")
    assert f"{name} (" in text
    assert "3 steps, 30 prompts, 120 responses" in text
    assert "output tokens" in text
    assert ("pixels" in text) == (name in ("video_understanding_7b", "image_understanding"))
    assert ("tool seconds, a call" in text) == (name == "search_7b")


def test_a_trace_is_written_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    made = shown(capsys, "search_7b", "--prompts", "10", "--seed", "4", "--json", str(file))
    again = shown(capsys, str(file))
    assert made.splitlines()[2:] == again.splitlines()[2:]
    kept, new = read(file), generate("search_7b", prompts=10, seed=4)
    assert np.array_equal(kept.steps[3].tool_seconds, new.steps[3].tool_seconds)


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'rollout-dataplane\[demo\]'"):
        summary.plot(generate("code_14b", prompts=1), tmp_path / "none.png")


@each_case(
    ("arguments", "said"),
    [
        (["no_such_task"], "neither a file nor one of the tasks: video_understanding_7b"),
        (["code_14b", "--steps", "0"], "steps is at least 1"),
        (["code_14b", "--scale", "nan"], "a scale is more than 0"),
        (["code_14b", "--cycle"], "goes with a trace file"),
        (["code_14b", "--plot", "x.no"], "no"),
        ([__file__, "--steps", "2"], "--steps"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
