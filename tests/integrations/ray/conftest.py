"""What the tests of Ray share: two Ray nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
SOON = {  # Ray looks whether its nodes live, and has figures
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "metrics_report_interval_ms": 500,
}


@pytest.fixture(scope="session")
def cluster(environment: None) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False, "_system_config": SOON})
    made.add_node(**NODE)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def driver(cluster: Any) -> Iterator[Any]:
    """This process drives a Ray job of both, for this module."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
