"""Several hosts: a partition is used from all, and survives the death of the host that leads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import dataplane as dp
from dataplane.client.embedded import ClusterNode, new_key
from dataplane.cluster.placement import winner
from dataplane.config import ClusterConfig
from dataplane.integrations import process
from dataplane.integrations import transfer_queue as tq
from dataplane.integrations.transfer_queue.partition import prefix
from dataplane.integrations.transfer_queue.settings import known_job
from tests.etcd import EtcdServer, needs_etcd
from tests.integrations.marks import PLANE
from tests.processes import eventually

pytestmark = [needs_etcd, *PLANE]

KEYS = ["a", "b", "c"]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ClusterNode]]:
    """Two, the first of which is this process's, with a coordinator that outlives them."""
    before = os.environ.get("DATAPLANE_ADDRESS")
    tq.close()
    process.close()
    config, key = dp.NodeConfig(memory="32MiB", spill=0, prewarm=0), new_key()
    with EtcdServer(tmp_path) as server:
        cluster = ClusterConfig("tcp://127.0.0.1:0", join=f"etcd://{server.address}")
        with closing(ClusterNode(config, cluster, key)) as one, closing(ClusterNode(config, cluster, key)) as two:
            monkeypatch.setenv("DATAPLANE_ADDRESS", one.address)
            with dp.connect(one.address) as a, dp.connect(two.address) as b:
                eventually(lambda: members(a) == members(b) == 2, "they know each other")
            yield [one, two]
            tq.close()
            process.close()
    assert os.environ.pop("DATAPLANE_ADDRESS") != before


def members(plane: dp.Plane) -> int:
    return len(plane.members().get("members", {}))


def far_partition(hosts: list[ClusterNode]) -> str:
    """A partition of this process's job that the second host leads, which has the highest hash of its name."""
    own_job = known_job()
    assert own_job is not None
    with dp.connect(hosts[0].address) as a, dp.connect(hosts[1].address) as b:
        own, far = (plane.stats().node.encode() for plane in (a, b))
    names = (f"partition {number}" for number in range(1000))
    return next(name for name in names if winner([own, far], "table", prefix(own_job.name) + name) == far)


def leads(hosts: list[ClusterNode], name: str) -> list[bool]:
    """Whether each host leads the partition."""
    own_job = known_job()
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


def test_a_partition_led_by_another_host_survives_its_death(hosts: list[ClusterNode]) -> None:
    tq.init()
    name = far_partition(hosts)
    tq.kv_batch_put(KEYS, name, fields=batch(), tags=[{"i": i} for i in range(3)])
    assert tq.get_client().get_meta(["x"], 2, name, task_name="train").custom_meta == [{"i": 0}, {"i": 1}]
    assert tq.get_client().get_partition_list() == [name]
    eventually(lambda: leads(hosts, name) == [False, True], "the other host leads it")
    with dp.connect(hosts[1].address) as plane:
        os.kill(plane.stats().pid, signal.SIGKILL)
    assert tq.kv_batch_get(["c", "a"], name)["x"].tolist() == [[4, 5], [0, 1]]
    assert tq.kv_list(name)[name] == {key: {"i": i} for i, key in enumerate(KEYS)}
    eventually(lambda: members(process.plane()) == 1, "the loss is known")
    tq.kv_batch_put(["d"], name, fields=batch()[:1])
    assert tq.kv_batch_get("d", name)["x"].tolist() == [[0, 1]]
