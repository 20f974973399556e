"""What the doors' tests share: an environment for processes, and one that has torch imported, and forks others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.integrations import process
from tests.integrations.nursery import Nursery

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """What processes find: this package, and no node. A Ray that a test began ends with the last of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.delenv("DATAPLANE_ADDRESS", raising=False)
        yield
        process.close()
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
