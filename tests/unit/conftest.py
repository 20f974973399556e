"""Units; those that need real processes fork them."""

from __future__ import annotations

import pytest

from tests import processes


@pytest.fixture(scope="session", autouse=True)
def _workers() -> None:
    processes.warm()
