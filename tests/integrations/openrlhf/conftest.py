"""OpenRLHF as it is installed, and a node of this process."""

from __future__ import annotations

import gc
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from dataplane.integrations import process

if importlib.util.find_spec("openrlhf") is not None:
    from examples.openrlhf_rollout.absent import stood_in

    with stood_in(), warnings.catch_warnings(action="ignore"):  # torch's own
        import openrlhf.trainer.ppo_utils.samples_generator
        import openrlhf.trainer.ray.launcher  # noqa: F401

#: Ray's workers import theirs by name, and to them `tests` may be the package of something that is installed.
HERE = Path(__file__).parent
sys.path.append(str(HERE))

SMALL = dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    gc.collect()  # what tests before have left to be freed was of their nodes
    process.settle()
    process.close()
    yield process.start(SMALL)
    process.close()
