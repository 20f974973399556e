"""Run pytest, and run each test that failed once more, alone.

    python -P tests/rerun.py ARGUMENT...

The arguments are pytest's, options in one word each, as `-n5` or `--dist=loadfile`. What fails again is a failure. What
passes the second time is printed as `unstable`, appended to the file that the environment names in `UNSTABLE`, and the
run passes. No test is marked for it and none runs more than twice. An error of collection or of pytest itself is final,
and so are more failures than `MANY`. The choice: docs/decisions/0093-a-failed-test-runs-once-more.md.

A process that has used Ray ends without the destructors of its libraries. `ray.shutdown()` leaves native threads (of
gRPC, and of Ray's clients), which may use what the destructors destroy: after their last test, some such processes
ended by signal 11.

This is run by its path: other distributions have a package `tests` too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPORT = "--report="
MANY = 25
"""Failures that chance does not explain."""


@dataclasses.dataclass(slots=True)
class Report:
    """One run of pytest: the exit status of its process; by test what failed, in one line, and the seconds that it
    took."""

    code: int = pytest.ExitCode.INTERNAL_ERROR
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def by_chance(self) -> bool:
        """Whether tests failed, and so few that chance may be the reason."""
        return self.code == pytest.ExitCode.TESTS_FAILED and 0 < len(self.failed) <= MANY


class Reporter:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._report = Report()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._report.seconds
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash is not None else report.longreprtext).splitlines() or [""]
            self._report.failed.setdefault(report.nodeid, lines[0 if crash is not None else -1][:300])

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(dataclasses.asdict(self._report)))


def run(arguments: list[str]) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report")
        command = [sys.executable, "-P", __file__, REPORT + str(file), *arguments]
        code = subprocess.run(command, check=False).returncode
        report = Report(**json.loads(file.read_text())) if file.exists() else Report()
        return dataclasses.replace(report, code=code)


def run_again(arguments: list[str], first: Report) -> Report:
    """Run the tests alone, one after the other, that failed in a run with these arguments."""
    options = [argument for argument in arguments if argument.startswith("-")]
    return run([*options, "-n0", *first.failed])


def main(arguments: list[str]) -> int:
    """Run and, if need be, run again; the exit status."""
    if arguments and arguments[0].startswith(REPORT):  # in a process of its own, for `run`
        sys.path.insert(0, os.getcwd())  # as `python -m pytest` has it
        code = pytest.main(arguments[1:], plugins=[Reporter(Path(arguments[0].removeprefix(REPORT)))])
        if "ray" in sys.modules:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    first = run(arguments)
    if not first.by_chance:
        return first.code
    print(f"\nonce more, alone: {len(first.failed)} tests that failed", flush=True)
    again = run_again(arguments, first)
    passed = [test for test in first.failed if test in again.seconds and test not in again.failed]
    unstable = [f"unstable: {test} ({first.failed[test]})" for test in passed]
    print(*unstable, sep="\n", flush=True)
    if "UNSTABLE" in os.environ and unstable:
        with open(os.environ["UNSTABLE"], "a") as file:
            print(*unstable, sep="\n", file=file)
    return again.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
