"""Mistakes that users make with the line of the configuration, in a Ray job: each is an error that says what to do.
Those that need no Ray are in `transfer_queue/test_mistakes.py`.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

import dataplane as dp
from dataplane.integrations import ray as nodes
from dataplane.integrations.verl import plugin
from tests.integrations.marks import SYSTEMS
from tests.integrations.nursery import Nursery
from tests.integrations.verl import driving
from tests.integrations.verl.storage_job import controlled, job, program, ray_of_this_process, stats
from tests.processes import eventually

pytestmark = SYSTEMS


def conf(backend: str = "Dataplane", **settings: Any) -> Any:
    return OmegaConf.create({"backend": {"storage_backend": backend, "Dataplane": settings}})


@pytest.fixture(scope="module")
def failed() -> list[Exception]:
    """What `init` says of what can not be started, one after the other."""
    assert plugin.loaded
    driving.drive()
    found = []
    small = {"memory": "64MiB", "spill": 0, "prewarm": 0}
    with socket.create_server(("", 0)) as taken:
        late = OmegaConf.merge(conf(**small), {"metrics": {"enabled": True, "port": taken.getsockname()[1]}})
        for given in (conf("Datplane"), conf(memroy="1GiB"), conf(memory="900TiB", spill=0), conf(job="a/b"), late):
            with pytest.raises(dp.DataplaneError) as raised:
                tq.init(given)
            found.append(raised.value)
            assert not nodes.running()
            assert not controlled()
            assert "DATAPLANE_JOB" not in os.environ
            assert tq.kv_list.__module__ == "transfer_queue.interface", "its calls are its own until a job runs"
    return found


@pytest.fixture(scope="module")
def queue(failed: Any) -> Iterator[Any]:
    with job(memory="16MiB", spill=0, prewarm=0) as made:
        yield made


def test_a_job_with_invalid_settings_is_refused_and_starts_once_corrected(failed: list[Exception], queue: Any) -> None:
    """A misspelt backend, a misspelt setting, more memory than a host has, an invalid name, and a port in use, which
    is found after the nodes have started."""
    backend, misspelt, too_large, name, port = failed
    assert isinstance(backend, dp.Misuse)
    assert "no backend 'Datplane': did you mean Dataplane?" in str(backend)
    assert isinstance(misspelt, dp.Misuse)
    assert "no setting 'backend.Dataplane.memroy': did you mean backend.Dataplane.memory?" in str(misspelt)
    assert isinstance(too_large, dp.Rejected)
    assert "memory is 900.0 TiB, and this host, or its container, has" in str(too_large)
    assert "a job's name is a text" in str(name)
    assert "port" in str(port)
    queue.kv_put("a", "train", {"x": torch.ones(2)}, {})
    assert queue.kv_batch_get("a", "train")["x"].values().tolist() == [1, 1]
    queue.kv_clear("a", "train")


def test_transfer_queue_is_left_alone_with_another_configuration(queue: Any, nursery: Nursery) -> None:
    """In a Ray without a job of ours, unless it misspells our name."""
    code = """
        told = error_of(lambda: tq.init({"backend": {"Dataplan": {"memory": "1GiB"}}}))
        start()
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        found = error_of(ours.install)
        tell([told, tq.kv_list.__module__, found])
        end()
    """
    with program(nursery, code) as running:
        (kind, said), module, (other, told) = running.hear()
        running.wait()
    assert (kind, module, other) == ("InvalidSetting", "transfer_queue.interface", "Misuse")
    assert "no backend 'Dataplan': did you mean Dataplane?" in said
    assert "install() before transfer_queue.init(), or transfer_queue.close()" in told


def test_a_second_job_on_one_ray_has_rows_of_its_own(queue: Any, nursery: Nursery) -> None:
    """So have its workers, which know nothing of it but their Ray job, also when the first job's controller has ended.
    With TransferQueue's own storage it is told that another job has its controller's name."""
    queue.kv_put("a", "train", {"x": torch.ones(3)}, {})
    second = """
        start(os.environ["RAY"])
        refused = error_of(tq.init)
        tq.close()  # which ends a controller that it knows
        theirs = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        ray.get(theirs.list_partitions.remote())
        tq.init(conf())
        tq.kv_put("b", "train", {"x": torch.ones(2)}, {})

        @ray.remote(num_cpus=0)
        def work():
            import dataplane.integrations.verl.plugin
            import transfer_queue as tq
            tq.init()
            return tq.kv_list()

        seen = ray.get(work.remote())
        ray.kill(theirs)
        tell([refused, seen, ray.get(work.options(runtime_env={"env_vars": {"A": "process of its own"}}).remote())])
        end()
    """
    with program(nursery, second, **ray_of_this_process()) as running:
        (_, said), seen, later = running.hear()
        running.wait()
    queue.init()  # makes the controller again
    assert "is that of another Ray job" in said
    assert "start a Ray for each job" in said
    assert seen == later == {"train": {"b": {}}}
    assert queue.kv_batch_get("a", "train")["x"].values().tolist() == [1, 1, 1]
    queue.kv_clear("a", "train")


def test_calls_to_a_killed_node_fail_until_the_next_init(queue: Any) -> None:
    queue.kv_put("a", "train", {"x": torch.ones(3)}, {})
    node = psutil.Process(stats().pid)
    os.kill(node.pid, signal.SIGKILL)
    eventually(lambda: not node.is_running() or node.status() == psutil.STATUS_ZOMBIE, "the node has ended")
    for call in (queue.kv_list, lambda: queue.kv_put("b", "train", {"x": torch.ones(3)}, {})):
        with pytest.raises(dp.PeerUnavailable, match=r"next init\(\)"):
            call()
    queue.init(conf(memory="16MiB"))
    queue.kv_put("b", "train", {"x": torch.ones(3)}, {})
    assert queue.kv_list() == {"train": {"b": {}}}


def test_a_worker_finds_the_next_node_after_its_first_failed_call(queue: Any) -> None:
    class Worker:
        def put(self, key: str) -> Any:
            from dataplane.integrations import transfer_queue

            transfer_queue.kv_put(key, "train", {"x": torch.ones(3)}, {})
            return transfer_queue.kv_list("train")

    worker = ray.remote(num_cpus=0)(Worker).remote()
    ray.get(worker.put.remote("a"))
    node = psutil.Process(stats().pid)
    os.kill(node.pid, signal.SIGKILL)
    eventually(lambda: not node.is_running() or node.status() == psutil.STATUS_ZOMBIE, "the node has ended")
    queue.init(conf(memory="16MiB"))
    with pytest.raises(dp.PeerUnavailable):  # once
        ray.get(worker.put.remote("b"))
    assert ray.get(worker.put.remote("b")) == {"train": {"b": {}}}
    queue.kv_clear("b", "train")
