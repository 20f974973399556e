"""Several hosts: a partition is used from all, and survives the death of the host that leads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import dataplane as dp
from dataplane.cluster.placement import Placement
from dataplane.integrations import process
from dataplane.integrations import transfer_queue as tq
from dataplane.integrations.transfer_queue import job
from dataplane.integrations.transfer_queue.partition import prefix
from tests.etcd import EtcdServer, needs_etcd
from tests.integration.test_hosts import Host, members, together
from tests.integrations.marks import PLANE
from tests.processes import eventually

pytestmark = [
    needs_etcd,
    pytest.mark.skipif(
        bool(packages_distributions().get("tests")),
        reason="something installed here is called tests: processes find that",
    ),
    *PLANE,
]

KEYS = ["a", "b", "c"]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Two, the first of which is this process's, with a coordinator that outlives them."""
    before = os.environ.get("DATAPLANE_ADDRESS")
    tq.close()
    process.close()
    with (
        EtcdServer(tmp_path) as server,
        Host(tmp_path / "0", f"etcd://{server.address}") as one,
        Host(tmp_path / "1", f"etcd://{server.address}") as two,
    ):
        monkeypatch.setenv("DATAPLANE_ADDRESS", one.address)
        with dp.connect(one.address) as a, dp.connect(two.address) as b:
            together(a, b)
        yield [one, two]
        tq.close()
        process.close()
    assert os.environ.pop("DATAPLANE_ADDRESS") != before


def far_partition(hosts: list[Host]) -> str:
    """A partition of this process's job that the second host leads, which has the highest hash of its name."""
    own_job = job.known()
    assert own_job is not None
    with dp.connect(hosts[0].address) as a, dp.connect(hosts[1].address) as b:
        own, far = (plane.stats().node.encode() for plane in (a, b))
    placement = Placement([own, far])
    names = (f"partition {number}" for number in range(1000))
    return next(name for name in names if placement.winner("table", prefix(own_job.name) + name) == far)


def leads(hosts: list[Host], name: str) -> list[bool]:
    """Whether each host leads the partition."""
    own_job = job.known()
    assert own_job is not None
    table = prefix(own_job.name) + name + "/"
    found = []
    for host in hosts:
        with dp.connect(host.address) as plane:
            own = plane.members()["members"][plane.stats().node]
            found.append(any(key.startswith(table) for key in own["leads"]))
    return found


def batch() -> Any:
    return TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=[3])


def test_a_partition_may_be_at_another_host(hosts: list[Host]) -> None:
    tq.init()
    name = far_partition(hosts)
    tq.kv_batch_put(KEYS, name, fields=batch(), tags=[{"i": i} for i in range(3)])
    assert tq.kv_batch_get(["c", "a"], name)["x"].tolist() == [[4, 5], [0, 1]]
    assert tq.get_client().get_meta(["x"], 2, name, task_name="train").custom_meta == [{"i": 0}, {"i": 1}]
    assert tq.get_client().get_partition_list() == [name]
    eventually(lambda: leads(hosts, name) == [False, True], "the other host leads it")


def test_a_partition_survives_the_host_that_leads_it(hosts: list[Host]) -> None:
    tq.init()
    name = far_partition(hosts)
    tq.kv_batch_put(KEYS, name, fields=batch(), tags=[{"i": i} for i in range(3)])
    eventually(lambda: leads(hosts, name) == [False, True], "the other host leads it")
    hosts[1].kill()
    assert tq.kv_batch_get(["c", "a"], name)["x"].tolist() == [[4, 5], [0, 1]]
    assert tq.kv_list(name)[name] == {key: {"i": i} for i, key in enumerate(KEYS)}
    eventually(lambda: len(members(process.plane())) == 1, "the loss is known")
    tq.kv_batch_put(["d"], name, fields=batch()[:1])
    assert tq.kv_batch_get("d", name)["x"].tolist() == [[0, 1]]
