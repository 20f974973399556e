"""A diagnosis is a value that others read back."""

from __future__ import annotations

from dataplane.diagnosis.causes import Cause, Diagnosis, Link, Role

WAIT = Link("trainer", "a", "job.py", 7, "train", "rows", 0.5)
CAUSE = Cause("code", "job.py", 3, "score", "reward", "a", (17, 18), 0.5, 0.25, (WAIT,), "workers", "add workers")
FOUND = Diagnosis(10.0, "trainer", 5.0, 2.0, 0.5, (CAUSE,), (Role("trainer", 1, ("a",), 0.75, {"rows": 0.25}),))


def test_it_reads_what_it_wrote() -> None:
    assert Diagnosis.read(FOUND.json()) == FOUND
