"""The coordinator that is an actor of a Ray job: the suite of all coordinators, and an actor that stops or dies."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Unavailable
from tests.conformance.coordinators import LEASE_S, CoordinatorSuite

ray = pytest.importorskip("ray", reason="needs Ray: make test-integrations")
from dataplane.coordinator.ray import RayCoordinator, start  # noqa: E402

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.leaks(reason="Ray keeps threads and descriptors for as long as the process lives"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

ROOT = Path(__file__).parents[3]
_names = itertools.count()


def _pid(_: Any) -> int:
    return os.getpid()


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # what else is installed may have other `tests`


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])
    ray.shutdown()
    ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    os.environ.pop("PYTHONPATH", None)
    if before is not None:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def actor(job: None) -> Iterator[Any]:
    made = start(f"coordinator{next(_names)}")
    yield made
    ray.kill(made)


class TestRay(CoordinatorSuite):
    @pytest.fixture
    async def coordinator(self, actor: Any) -> AsyncIterator[Coordinator]:  # type: ignore[override]
        coordinator = RayCoordinator(actor, timeout_s=60.0)
        yield coordinator
        await coordinator.aclose()


async def test_it_is_found_by_its_name_and_is_one(actor: Any) -> None:
    one, other = RayCoordinator(actor, 60.0), RayCoordinator(start(f"coordinator{next(_names) - 1}"), 60.0)
    assert await one.swap("k", None, b"1") == b"1"
    assert await other.swap("k", None, b"2") == b"1"
    assert one.address == other.address


async def test_stopped_it_says_that_the_outcome_is_unknown(actor: Any) -> None:
    """It takes calls, and does not answer: they happen once it goes on."""
    patient, client = RayCoordinator(actor, 60.0), RayCoordinator(actor, 0.5)
    await patient.swap("k", None, b"1")
    process = ray.get(actor.__ray_call__.remote(_pid))
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(OutcomeUnknown):
            await client.swap("k", b"1", b"2")
        with pytest.raises(OutcomeUnknown):
            await client.register("a", b"", LEASE_S)
        with pytest.raises(Unavailable):
            await client.read("k")
    finally:
        os.kill(process, signal.SIGCONT)
    async with asyncio.timeout(60):
        while await patient.read("k") != b"2":
            await asyncio.sleep(0.02)
    assert await patient.swap("k", b"1", b"2") == b"2"


async def test_dead_it_is_unavailable(actor: Any) -> None:
    client = RayCoordinator(actor, 60.0)
    registration = await client.register("a", b"", 30.0)
    async with aclosing(client.watch("k")) as watch:
        assert await anext(watch) is None
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        ray.kill(actor)
        with pytest.raises(Unavailable):
            await waiting
    for call in (client.members, registration.renew, lambda: client.read("k")):
        with pytest.raises(Unavailable):
            await call()
    with pytest.raises(OutcomeUnknown):
        await client.swap("k", None, b"1")
