"""The example, small: it trains, and its responses are the same with and without history."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_the_example_generates_the_same_responses_with_history(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ["--epochs", "2", "--prompts", "2", "--samples", "2", "--shown", "20", "--json", str(figures)]
    command = [sys.executable, "-m", "examples.history_rollout", *small]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = json.loads(figures.read_text())
    assert first["different"] == second["different"] == 0
    assert first["proposed"] == 0 < second["proposed"]
    assert second["verifications"] <= second["tokens"]
