"""Batches; what a false byte might end runs in a process of its own."""

from __future__ import annotations

import pytest

from tests import processes


@pytest.fixture(scope="session", autouse=True)
def _workers() -> None:
    processes.warm()
