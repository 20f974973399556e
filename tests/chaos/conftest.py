"""Chaos: real processes are killed, stopped, starved and lied to: a test or more for each fault of one host."""

from __future__ import annotations

import pytest

from tests import processes


@pytest.fixture(scope="session", autouse=True)
def _workers() -> None:
    processes.warm()
