"""Tests that failed run once more, alone; what they did is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each_case

ROOT = Path(__file__).parents[2]

ONCE = """
import os, pathlib, pytest
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
"""


def run(tmp_path: Path, workers: str = "-n1", /, **modules: str) -> tuple[int, str, list[str]]:
    """The exit status, what was printed, and the lines of the file of unstable tests."""
    for name, text in modules.items():
        (tmp_path / f"test_{name}.py").write_text(text)
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
    ]
    assert printed.endswith("\n".join(unstable) + "\n")


def test_a_test_that_fails_twice_is_a_failure(tmp_path: Path) -> None:
    code, _, unstable = run(tmp_path, "-n0", twice="def test_fails(): assert 0")
    assert (code, unstable) == (pytest.ExitCode.TESTS_FAILED, [])


# Cases of a test: each is run by itself, and an error names the one that it is of.


@each_case("number", [1, 2, 3])
def test_each_case_has_a_separate_directory_and_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert not hasattr(each_case, "number")
    monkeypatch.setattr(each_case, "number", number, raising=False)
    (tmp_path / "file").touch(exist_ok=False)


def test_case_lists_are_combined_and_errors_name_their_case() -> None:
    seen: list[Any] = []

    @each_case("first", ["a", "b"])
    @each_case(("second", "third"), [(1, 2), pytest.param(3, 4, id="last")])
    def run(first: str, second: int, third: int) -> None:
        seen.append((first, second, third))
        assert (first, third) != ("b", 4)

    with pytest.raises(AssertionError) as error:
        run()
    assert seen == [("a", 1, 2), ("a", 3, 4), ("b", 1, 2), ("b", 3, 4)]
    assert error.value.__notes__ == ["case 1: second = 3, third = 4", "case 1: first = 'b'"]
