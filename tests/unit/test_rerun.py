"""Tests that failed run once more, alone; what they did is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ONCE = """
import os, pathlib, pytest, time
def first(name):
    made = pathlib.Path(__file__).with_name(name)
    return not made.exists() and not made.write_text("")
def test_passes(): pass
@pytest.mark.parametrize("x", ["a b::[c]"])
def test_fails_once(x):
    assert not first("failed"), "once"
def test_crashes_once():
    if first("crashed"):
        os._exit(3)
@pytest.mark.timeout(0.2)
def test_swallows_its_limit_once():
    if first("hung"):
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
"""

LIMITS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import pytest_runtest_logfinish, pytest_runtest_teardown, pytest_timeout_set_timer
"""


def run(tmp_path: Path, workers: str = "-n1", /, **modules: str) -> tuple[int, str, list[str]]:
    """The exit status, what was printed, and the lines of the file of unstable tests."""
    for name, text in modules.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(LIMITS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    told = tmp_path / "unstable"
    environment = {**os.environ, "UNSTABLE": str(told)}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-P", str(ROOT / "tests" / "rerun.py"), "-q", workers, "-pno:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, told.read_text().splitlines() if told.exists() else []


def test_a_test_that_fails_once_passes_and_is_listed_as_unstable(tmp_path: Path) -> None:
    code, printed, unstable = run(tmp_path, once=ONCE)
    assert code == 0, printed
    assert sorted(line.split(" (")[0] for line in unstable) == [
        "unstable: test_once.py::test_crashes_once",
        "unstable: test_once.py::test_fails_once[a b::[c]]",
        "unstable: test_once.py::test_swallows_its_limit_once",
    ]
    assert printed.endswith("\n".join(unstable) + "\n")


def test_a_test_that_fails_twice_is_a_failure(tmp_path: Path) -> None:
    code, _, unstable = run(tmp_path, "-n0", twice="def test_fails(): assert 0")
    assert (code, unstable) == (pytest.ExitCode.TESTS_FAILED, [])
