"""What the doors' tests share: a process that has torch imported, and forks others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
