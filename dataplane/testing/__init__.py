"""Tools for users' tests: a node in this process, a clock, faults, and the conformance suite of samplers.

    from dataplane import testing

    def test_my_reward_stage():
        with testing.plane() as plane:                       # a node in this process, in some milliseconds
            rollouts = plane.stream("rollouts", tasks=["reward", "actor"])
            ...

A user's sampler can run the same suite as this package's:

    class TestMine(testing.SamplerSuite):
        def made(self):
            return MySampler()

The import of this package does not import pytest; that of the suite does. Names that are not listed here may
change.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dataplane.testing.clock import ManualClock as ManualClock
from dataplane.testing.faults import Failing as Failing
from dataplane.testing.faults import failing as failing
from dataplane.testing.nodes import LocalNode as LocalNode
from dataplane.testing.nodes import NodeProcess as NodeProcess
from dataplane.testing.nodes import node as node
from dataplane.testing.nodes import plane as plane
from dataplane.testing.samples import candidates as candidates

if TYPE_CHECKING:
    from dataplane.testing.samplers import SamplerSuite as SamplerSuite

__all__ = [
    "Failing",
    "LocalNode",
    "ManualClock",
    "NodeProcess",
    "SamplerSuite",
    "candidates",
    "failing",
    "node",
    "plane",
]


def __getattr__(name: str) -> Any:
    if name != "SamplerSuite":
        raise AttributeError(f"module 'dataplane.testing' has no attribute {name!r}")
    module = "dataplane.testing.samplers"
    try:
        import pytest
    except ImportError as error:
        raise ImportError(f"{name} needs pytest: pip install 'rollout-dataplane[testing]'") from error
    if module not in sys.modules:
        pytest.register_assert_rewrite(module)  # so that a failed assertion shows its values
    return getattr(importlib.import_module(module), name)
