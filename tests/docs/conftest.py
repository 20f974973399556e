"""Pages' code is forked from a server that has imported torch."""

from __future__ import annotations

import pytest

from tests import torches


@pytest.fixture(scope="session", autouse=True)
def _forked() -> None:
    torches.warm()
