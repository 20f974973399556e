"""The public face, end to end: both faces, several processes, nodes that come and go."""

from __future__ import annotations

import pytest

from tests import processes


@pytest.fixture(scope="session", autouse=True)
def _workers() -> None:
    processes.warm()
