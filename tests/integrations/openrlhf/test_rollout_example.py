"""The example, small: the same steps of OpenRLHF by value and by reference give the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF: make test-integrations")

pytestmark = pytest.mark.timeout(600)  # its workers import OpenRLHF, torch and transformers, twice

ROOT = Path(__file__).parents[3]


def run(*options: str) -> list[str]:
    """What it prints, after what OpenRLHF logs."""
    small = ["--prompts", "2", "--answers", "2", "--side", "112", "--steps", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "DATAPLANE_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "examples.openrlhf_rollout", *small, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("by ")) :]


def put_mib(lines: list[str]) -> float:
    (line,) = [line for line in lines if "the driver put" in line]
    return float(line.split()[3])


def test_by_reference_as_by_value() -> None:
    plain, lazy = run("--plain"), run()
    assert plain[0] == "by value"
    assert lazy[0] == "by reference"
    assert lazy[1].rpartition(",")[0] == plain[1].rpartition(",")[0]  # the loss and the reward; not the time
    assert put_mib(lazy) < put_mib(plain) / 20
