"""What all of these tests share: an environment for processes, and one that has torch imported, and forks others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from dataplane.integrations import process
from tests.integrations import ray_workers
from tests.integrations.nursery import ROOT, Nursery

pytest.register_assert_rewrite("tests.integrations.images")

THERE = all(find_spec(name) for name in ("openrlhf", "ray", "transfer_queue", "verl"))
collect_ignore_glob = [] if THERE else ["*"]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """What processes find: this package, Ray workers with torch, and no node. A Ray that a test began ends with the
    last of them."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if THERE:
            ray_workers.use()
            workers = stack.enter_context(ray_workers.preloaded())
            patch.setenv(ray_workers.VARIABLE, workers)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.delenv("DATAPLANE_ADDRESS", raising=False)
        for name in ("enable_worker_prestart", "prestart_worker_first_driver", "USAGE_STATS_ENABLED"):
            patch.setenv(f"RAY_{name}", "0")  # or each Ray starts a worker a processor that no test asks for
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: none of the processor where others work
        yield
        process.close()
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


@pytest.fixture(scope="session")
def begun() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def nursery(begun: Nursery) -> Nursery:
    """It runs before the first test that uses it, which is so not blamed for it."""
    begun.begin()
    return begun
