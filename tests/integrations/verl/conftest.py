"""What the tests of verl's doors share: an environment for their processes, and a Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.integrations import process

ROOT = Path(__file__).parents[3]


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


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    """A Ray job of this process, for this module. Its nodes, if it has any, end with the module."""
    from tests.integrations.verl import driving

    driving.drive()
    yield
    driving.leave()
