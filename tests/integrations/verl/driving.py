"""The Ray job that this process drives: one for all modules that need a single host, as a Ray takes seconds to start.

A module that leaves it leaves no node in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations import ray as nodes

_ALONE = {"num_cpus": 5, "include_dashboard": False, "object_store_memory": 160 << 20}

_address = ""


def drive(address: str = "local") -> None:
    """Drive a job of the Ray at this address, or of one of this process's own: that which it has, if it has one."""
    global _address
    if not ray.is_initialized() or _address != address:
        ray.shutdown()
        ray.init(address, log_to_driver=False, **(_ALONE if address == "local" else {}))
        _address = address


def leave() -> None:
    """End the nodes, and this process's part in them. The Ray stays."""
    process.close()
    nodes.down()


@contextmanager
def alone(config: dp.NodeConfig) -> Iterator[dp.Plane]:
    """The plane of this process with a node of its own, whether it drives a job or not."""
    process.close()
    with dp.connect(config=config) as plane, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_ADDRESS", plane.address)
        yield process.plane()
        process.close()
