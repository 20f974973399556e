"""Chaos: real processes are killed, stopped, starved and lied to: a test or more for each fault of one host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import _workers as _workers
from tests.integration.test_hosts import pair as pair
from tests.integration.test_hosts import planes as planes
from tests.integration.test_hosts import two as two
from tests.mounts import mounted
from tests.processes import StandingNode


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandingNode]:
    """A node of its own for each test, with the settings that the module calls `NODE`."""
    with StandingNode(tmp_path, **request.module.NODE) as node:
        yield node


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "-o", "size=4m") as directory:
        yield directory
