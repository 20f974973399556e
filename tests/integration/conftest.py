"""The public face, end to end: both faces, several processes, nodes that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dataplane as dp
from tests import etcd, processes, torches
from tests.integration.faces import FACES
from tests.processes import StandingNode

if TYPE_CHECKING:
    from tests.integration.test_hosts import Host


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    processes.warm()
    with etcd.shared():
        yield


@pytest.fixture(scope="session")
def with_torch() -> None:
    torches.warm()


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandingNode]:
    """A node of its own for each test, with the settings that the module calls `NODE`."""
    with StandingNode(tmp_path, **getattr(request.module, "NODE", {"memory": "32MiB"})) as node:
        yield node


@pytest.fixture(params=["sync", pytest.param("aio", marks=pytest.mark.long)])
def plane(request: pytest.FixtureRequest, node: StandingNode) -> Iterator[Any]:
    """A face on it: the other has the same calls, and is tested at length."""
    with FACES[request.param](node.address) as plane:
        yield plane


@pytest.fixture
def empty(plane: Any) -> Iterator[None]:
    """The test leaves no bytes in the node."""
    yield
    stats = plane.stats()
    assert (stats.shards, stats.memory_used, stats.pinned_bytes) == (0, 0, 0)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Three that know each other."""
    from tests.integration.test_hosts import Host  # a module of tests, whose assertions pytest rewrites

    with Host(tmp_path / "0") as one, Host(tmp_path / "1", one) as two, Host(tmp_path / "2", one) as three:
        yield [one, two, three]


@pytest.fixture
def planes(hosts: list[Host]) -> Iterator[list[Any]]:
    """A plane on each of the three."""
    from tests.integration.test_hosts import together

    with dp.connect(hosts[0].address) as a, dp.connect(hosts[1].address) as b, dp.connect(hosts[2].address) as c:
        together(a, b, c)
        yield [a, b, c]
