"""Several hosts: a partition is used from all, and what is told when the host that has it dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

from tensordict import TensorDict  # noqa: E402

import dataplane as dp  # noqa: E402
from dataplane.cluster.placement import Placement  # noqa: E402
from dataplane.integrations import process  # noqa: E402
from dataplane.integrations import transfer_queue as tq  # noqa: E402
from dataplane.integrations.transfer_queue import job  # noqa: E402
from dataplane.integrations.transfer_queue.partition import prefix  # noqa: E402
from tests.integration.test_hosts import Host, members, together  # noqa: E402
from tests.processes import eventually  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        bool(packages_distributions().get("tests")),
        reason="something installed here is called tests: processes find that",
    ),
    pytest.mark.leaks(reason="the process's plane lives as long as the process"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

KEYS = ["a", "b", "c"]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Two, the first of which is this process's."""
    before = os.environ.get("DATAPLANE_ADDRESS")
    tq.close()
    process.close()
    with Host(tmp_path / "0") as one, Host(tmp_path / "1", one) as two:
        monkeypatch.setenv("DATAPLANE_ADDRESS", one.address)
        with dp.connect(one.address) as a, dp.connect(two.address) as b:
            together(a, b)
        yield [one, two]
        tq.close()
        process.close()
    assert os.environ.pop("DATAPLANE_ADDRESS") != before


def far_partition(hosts: list[Host]) -> str:
    """A partition of this process's job whose home is the second host."""
    own_job = job.known()
    assert own_job is not None
    with dp.connect(hosts[0].address) as a, dp.connect(hosts[1].address) as b:
        own, far = (bytes.fromhex(plane.stats().node) for plane in (a, b))
    placement = Placement([own, far])
    names = (f"partition {number}" for number in range(1000))
    return next(name for name in names if placement.home("table", prefix(own_job.name) + name) == far)


def batch() -> Any:
    return TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=[3])


def test_a_partition_may_be_at_another_host(hosts: list[Host]) -> None:
    tq.init()
    name = far_partition(hosts)
    tq.kv_batch_put(KEYS, name, fields=batch(), tags=[{"i": i} for i in range(3)])
    assert tq.kv_batch_get(["c", "a"], name)["x"].tolist() == [[4, 5], [0, 1]]
    assert tq.get_client().get_meta(["x"], 2, name, task_name="train").custom_meta == [{"i": 0}, {"i": 1}]
    assert tq.get_client().get_partition_list() == [name]


def test_a_partition_that_was_lost_with_its_host_is_told_once_and_can_be_made_again(hosts: list[Host]) -> None:
    tq.init()
    name = far_partition(hosts)
    tq.kv_batch_put(KEYS, name, fields=batch())
    hosts[1].kill()
    with pytest.raises((dp.PeerUnavailable, dp.OwnerDied)) as told:
        tq.kv_batch_get(KEYS, name)
    eventually(lambda: len(members(process.plane())) == 1, "the loss is known")
    if not isinstance(told.value, dp.OwnerDied):
        with pytest.raises(dp.OwnerDied):
            tq.kv_batch_get(KEYS, name)
    assert tq.kv_list(name) == {}
    tq.kv_batch_put(KEYS[:1], name, fields=batch()[:1])
    assert tq.kv_batch_get("a", name)["x"].tolist() == [[0, 1]]
