"""Failing calls into the operating system, drawn from the matrix of `tests.faults`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.faults import driver


def attack(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    """See `tests.attack`."""
    summary = driver.run(seed, seconds)
    failures = summary["failures"]
    assert not failures, f"cells {failures} of `python -m tests.faults.driver`"
    return {"cells": summary["cells"], "failed calls": summary["failed_calls"]}
