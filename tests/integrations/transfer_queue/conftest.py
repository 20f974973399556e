"""The system under test, twice: TransferQueue itself, with Ray and its simple storage, and `dataplane` in its place."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

import dataplane as dp
from tests.integrations.marks import long

_numbers = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a node, which the environment names while the tests run."""
    from dataplane.integrations import process
    from dataplane.integrations import transfer_queue as tq

    before = os.environ.pop("DATAPLANE_ADDRESS", None)
    config = dp.NodeConfig(memory="128MiB", spill="256MiB", prewarm=0, spill_dir=tmp_path_factory.mktemp("spill"))
    with dp.connect(config=config) as plane:
        os.environ["DATAPLANE_ADDRESS"] = plane.address
        yield plane.address
        tq.close()
        process.close()
    os.environ.pop("DATAPLANE_ADDRESS", None)
    if before is not None:
        os.environ["DATAPLANE_ADDRESS"] = before


@pytest.fixture(scope="session")
def cluster(environment: None) -> Iterator[str]:
    """The address of a Ray that all jobs of these tests use, one after the other: a Ray takes seconds to start. Its
    workers inherit no node and no job."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DATAPLANE_")]:
            patch.delenv(name)
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": 256 << 20},
        )
    yield made.address
    made.shutdown()


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> Iterator[Any]:
    """TransferQueue, started in a Ray job of this process."""
    import ray
    import transfer_queue as real
    from omegaconf import OmegaConf

    ray.init(request.getfixturevalue("cluster"), log_to_driver=False)
    real.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield real
    real.close()
    ray.shutdown()


@pytest.fixture(params=["dataplane", *long("transfer_queue")])
def tq(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module `transfer_queue`: ours, and in the long tests theirs, which shows that the tests are true of it."""
    if request.param == "transfer_queue":
        yield request.getfixturevalue("theirs")
    else:
        yield from _ours(request)


@pytest.fixture
def ours(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _ours(request)


def _ours(request: pytest.FixtureRequest) -> Iterator[Any]:
    from dataplane.integrations import transfer_queue as tq

    request.getfixturevalue("node")
    tq.init()
    yield tq
    for name in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(name)


@pytest.fixture
def pid() -> str:
    """The name of a partition that nobody has used."""
    return f"part_{next(_numbers)}"
