"""Run pytest, and run each test that failed once more, alone.

    python -m tests.rerun ARGUMENT...

The arguments are pytest's, options as `-n5` or `--dist=loadfile`, in one word each. What fails again is a failure. What passes the second time is printed as `unstable`, appended to the file that the
environment names in `UNSTABLE`, and the run passes. No test is marked for it and none runs more than twice. An error of
collection or of pytest itself is final, and so are more failures than `MANY`. `--first` is an option of the first run
only, such as those of pytest-xdist. The choice: docs/decisions/0093-a-failed-test-runs-once-more.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MANY = 25
"""Failures that chance does not explain."""


class Failures:
    """The plugin that writes the failures of a run as JSON: node id to the first line that says what failed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[0] if crash is not None else report.longreprtext.splitlines()[-1]
            self._failed.setdefault(report.nodeid, reason[:300])

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._failed))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="write the failures to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--failures") and not hasattr(config, "workerinput"):  # workers report to the controller
        config.pluginmanager.register(Failures(config.getoption("--failures")))


def run(arguments: list[str]) -> tuple[int, dict[str, str]]:
    """Pytest's exit status, and the failures of this run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "failures")
        command = [sys.executable, "-m", "pytest", "-p", "tests.rerun", f"--failures={file}", *arguments]
        code = subprocess.run(command, check=False).returncode
        return code, json.loads(file.read_text()) if file.exists() else {}


def main(arguments: list[str]) -> int:
    code, failed = run(arguments)
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MANY:
        return code
    print(f"\nonce more, alone: {len(failed)} tests that failed", flush=True)
    options = [argument for argument in arguments if argument.startswith("-")]
    code, again = run([*options, "-n0", *failed])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    unstable = [f"unstable: {test} ({reason})" for test, reason in failed.items() if test not in again]
    print(*unstable, sep="\n", flush=True)
    if "UNSTABLE" in os.environ and unstable:
        with open(os.environ["UNSTABLE"], "a") as file:
            print(*unstable, sep="\n", file=file)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
