"""What the tests of transports share: memory to offer, and two transports that the test's class or module makes."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from dataplane.transport.channels import Transport
from tests.conformance.transports import PAGE, Shelf, Shelves, noise


@asynccontextmanager
async def started(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    transport: Transport = (request.instance or request.module).made()
    await transport.start()
    yield transport
    await transport.aclose()


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    async with started(request) as transport:
        yield transport


@pytest.fixture
async def reader(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    async with started(request) as transport:
        yield transport


@pytest.fixture
def shelf() -> Iterator[Shelves]:
    made: list[Shelf] = []

    def one(size: int, seed: int = 1) -> Shelf:
        content = noise(size, seed)
        fd = os.memfd_create("offered")
        os.ftruncate(fd, size + 2 * PAGE)
        mapped = mmap.mmap(fd, size + 2 * PAGE)
        made.append(Shelf(fd, content, mapped))
        mapped[:] = b"\xff" * len(mapped)
        mapped[PAGE : PAGE + size] = content.tobytes()
        return made[-1]

    yield one
    for each in made:
        each.close()
