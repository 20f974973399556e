"""A Ray job whose TransferQueue stores in the plane, and actors that write and read, for the tests of the backend."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dataplane as dp
from dataplane.integrations import process
from tests.integrations.nursery import ROOT, Nursery, Process
from tests.processes import eventually

#: What programs of a job of their own begin with (`program`).
HEAD = """
import time
import ray
import dataplane.integrations.verl.plugin
import transfer_queue as tq
from omegaconf import OmegaConf
from dataplane.integrations import process
from dataplane.integrations import transfer_queue as ours

def start(address="local"):
    alone = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 << 20}
    ray.init(address, log_to_driver=False, **(alone if address == "local" else {}))

def conf(**settings):
    small = {"memory": "64MiB", "spill": 0, "prewarm": 0}
    return OmegaConf.create({"backend": {"storage_backend": "Dataplane", "Dataplane": small | settings}})

def end():
    tq.close()
    ray.shutdown()

def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]

def used():
    return process.plane().stats().memory_used

def eventually(holds, what):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
"""


def program(nursery: Nursery, code: str, **environment: str) -> Process:
    """A process that runs a program, with no node and no job in its environment unless it is given one."""
    unset = dict.fromkeys(("DATAPLANE_ADDRESS", "DATAPLANE_JOB", "DATAPLANE_TRANSFER_QUEUE"), "")
    nothing = unset | {"PYTHONPATH": str(ROOT)}
    return nursery.process(HEAD + textwrap.dedent(code), **(nothing | environment))


def ray_of_this_process() -> dict[str, str]:
    """The environment of a program that drives another job of the Ray whose job this process drives: `RAY`, and its
    token as Ray set it here."""
    import ray

    token = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    return {"RAY": ray.get_runtime_context().gcs_address, **token}


@contextmanager
def job(address: str = "local", **settings: Any) -> Iterator[Any]:
    """`transfer_queue`, initialised, with these settings of the backend, in a job on this Ray."""
    import transfer_queue as tq
    from omegaconf import OmegaConf

    from dataplane.integrations.verl import plugin
    from tests.integrations.verl import driving

    assert plugin.loaded
    driving.drive(address)
    try:
        tq.init(OmegaConf.create({"backend": {"storage_backend": "Dataplane", "Dataplane": settings}}))
        yield tq
    finally:
        tq.close()
        eventually(lambda: not controlled(), "its controller has ended, and is not taken for the next one's")
        driving.leave()


def controlled() -> bool:
    """Whether the Ray that this process drives has a controller of TransferQueue."""
    import ray

    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return False
    return True


class Worker:
    """Another process of the job."""

    def __init__(self) -> None:
        import transfer_queue as tq

        tq.init()  # which finds the job's controller, and with it this package
        self._tq = tq

    def call(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """What this function of `transfer_queue`, or of its client, returns here; or a figure of the node."""
        if name in ("used", "fetched", "own"):
            figures = stats()
            return {"used": figures.memory_used, "fetched": figures.fetched_bytes, "own": own(figures)}[name]
        of = self._tq if hasattr(self._tq, name) else self._tq.get_client()
        return getattr(of, name)(*arguments, **named)


def worker(place: str = "") -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker may have other `tests`
    where = NodeAffinitySchedulingStrategy(place, soft=False) if place else "DEFAULT"
    return ray.remote(num_cpus=0, scheduling_strategy=where)(Worker).remote()


def stats() -> dp.Stats:
    return process.plane().stats()


def own(figures: dp.Stats) -> int:
    """How many shards a node has that are no copies of others'."""
    return figures.shards - figures.copies
