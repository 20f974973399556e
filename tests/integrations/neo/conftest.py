"""What the tests of verl's NeoProto share. They need verl's `neo` branch, which is on no index, first on PYTHONPATH:

PYTHONPATH=CHECKOUT VERL_USE_EXTERNAL_PLUGINS=none .venv-integrations/bin/python -m pytest tests/integrations/neo
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import dataplane as dp

SETTINGS = dp.NodeConfig(memory="128MiB", spill=0, prewarm=0)


def _is_neo() -> bool:
    try:
        return find_spec("verl.experimental.neoproto") is not None
    except ImportError:
        return False


collect_ignore_glob = [] if _is_neo() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """What stays of a process that has used the engine."""
    from dataplane.integrations import process

    assert process.settle()


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A node of the test's own, which the doors of this process use."""
    from dataplane.integrations import process

    process.close()
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    with dp.connect(config=SETTINGS) as plane:
        yield plane
        gc.collect()
        assert process.settle()
        process.close()


@pytest.fixture
def engine(plane: Any) -> Iterator[Any]:
    """The plane's engine, as verl's default, in a process that is the trainer's."""
    from verl.experimental.neoproto import neo, set_default_storage_engine

    from dataplane.integrations.verl.neo import BACKEND, DataplaneStorageEngine

    made = DataplaneStorageEngine()
    set_default_storage_engine(made)
    yield made
    set_default_storage_engine(None)
    neo.GLOBAL_ENGINE_DICT.pop(BACKEND, None)
