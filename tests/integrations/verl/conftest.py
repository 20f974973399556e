"""What the tests of verl's doors share: a Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    """A Ray job of this process, for this module. Its nodes, if it has any, end with the module."""
    from tests.integrations.verl import driving

    driving.drive()
    yield
    driving.leave()
