"""Mistakes that users make with the backend: each is an error that says what to do. The same ten with the module are in
`transfer_queue/test_mistakes.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

import dataplane as dp
from tests.integrations.marks import SYSTEMS
from tests.integrations.nursery import Nursery
from tests.integrations.verl import driving
from tests.integrations.verl.storage_job import job, own, program, ray_of_this_process, stats
from tests.processes import eventually
from tests.users import needs_root

pytestmark = SYSTEMS


@pytest.fixture(scope="module")
def failed() -> list[dp.DataplaneError]:
    """What `init` says of what can not be started, one after the other."""
    driving.drive()
    found = []
    for settings in ({"memroy": "1GiB"}, {"memory": "900TiB", "spill": 0}):
        with pytest.raises(dp.DataplaneError) as raised:
            tq.init(OmegaConf.create({"backend": {"storage_backend": "Dataplane", "Dataplane": settings}}))
        found.append(raised.value)
    return found


@pytest.fixture(scope="module")
def queue(failed: Any) -> Iterator[Any]:
    with job(memory="4MiB", spill="1MiB", prewarm=0, timeout=0.5) as made:
        yield made


def told_by(nursery: Nursery, code: str, **environment: str) -> Any:
    """What a program tells."""
    with program(nursery, code, **environment) as running:
        told = running.hear()
        running.wait()
        return told


def test_a_job_with_invalid_settings_is_refused_and_starts_once_corrected(
    failed: list[dp.DataplaneError], queue: Any
) -> None:
    """A misspelt setting, and more memory than a host has."""
    misspelt, too_large = failed
    assert isinstance(misspelt, dp.Misuse)
    assert "no setting memroy: there are memory" in str(misspelt)
    assert isinstance(too_large, dp.Rejected)
    assert "memory is 900.0 TiB, and this host, or its container, has" in str(too_large)
    assert "give at most that" in str(too_large)
    queue.kv_put("a", "train", {"x": torch.ones(2)}, {})
    assert queue.kv_batch_get("a", "train")["x"].values().tolist() == [1, 1]
    queue.kv_clear("a", "train")


def test_a_wrong_partition_or_key_is_reported_with_suggestions(queue: Any) -> None:
    queue.kv_put("a", "train", {"x": torch.ones(3)}, {})
    with pytest.raises(ValueError, match=r"no partition 'trian': nothing was put there.* did you mean train"):
        queue.kv_batch_get("a", "trian")
    with pytest.raises(dp.Misuse, match="has no key 'b': not put yet, or cleared; there are a"):
        queue.kv_batch_get("b", "train")
    queue.kv_clear("a", "train")


def test_a_missing_field_is_reported_with_suggestions(queue: Any) -> None:
    queue.kv_put("a", "train", {"input_ids": torch.ones(3)}, {})
    with pytest.raises(ValueError, match="have input_id: put it first; did you mean input_ids"):
        queue.kv_batch_get("a", "train", "input_id")
    queue.kv_clear("a", "train")


def test_a_job_without_a_reachable_node_is_refused_with_a_remedy(nursery: Nursery) -> None:
    """No Ray; and an address where no node listens, as the job starts."""
    code = """
        told = [error_of(lambda: plugin.start(conf()))]
        os.environ["DATAPLANE_ADDRESS"] = "unix:///nowhere.sock"
        tell([*told, error_of(lambda: plugin.start(conf()))])
    """
    (kind, said), other = told_by(nursery, code)
    assert kind == "Misuse"
    assert "ray.init()" in said
    kind, said = other
    assert kind == "PeerUnavailable"
    assert "nowhere.sock" in said


def test_rows_of_a_killed_node_are_reported_lost_and_the_job_continues(queue: Any) -> None:
    """Its rows are lost, and named; what is put next is in the node that follows, and nobody has to connect again."""
    queue.kv_put("a", "train", {"x": torch.ones(3)}, {})
    node = psutil.Process(stats().pid)
    os.kill(node.pid, signal.SIGKILL)
    eventually(lambda: not node.is_running() or node.status() == psutil.STATUS_ZOMBIE, "the node has ended")
    queue.kv_put("b", "train", {"x": torch.ones(3)}, {})
    assert queue.kv_batch_get("b", "train")["x"].values().tolist() == [1, 1, 1]

    def told() -> str:
        try:
            queue.kv_batch_get("a", "train")
        except dp.OwnerDied as error:
            return str(error)
        except dp.PeerUnavailable:  # the next node does not know yet who was there
            return ""
        raise AssertionError("it was read")

    assert "put it again" in eventually(told, "its end is known")
    queue.kv_put("a", "train", {"x": torch.zeros(3)}, {})
    assert queue.kv_batch_get("a", "train")["x"].values().tolist() == [0, 0, 0]
    queue.kv_clear(["a", "b"], "train")
    eventually(lambda: own(stats()) == 0, "all of it is free")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"backend": {"Dataplane": {"memory": "5MiB"}}}, "backend.Dataplane.memory = 4MiB, and not 5MiB"),
        ({"controller": {"polling_mode": True}}, "controller.polling_mode = False, and not True"),
        ({"controller": {"sampler": "GRPOGroupNSampler"}}, "controller.sampler = SequentialSampler"),
    ],
)
def test_a_second_init_with_other_settings_is_misuse(queue: Any, given: Any, match: str) -> None:
    with pytest.raises(dp.Misuse, match=f"{match}.*call transfer_queue.close"):
        queue.init(OmegaConf.create(given))
    queue.init()
    queue.init(OmegaConf.create({"backend": {"storage_backend": "Dataplane", "Dataplane": {"memory": "4MiB"}}}))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"backend": {"storage_backend": "Datplane"}}, "no backend 'Datplane': did you mean Dataplane"),
        ({"backend": {"storage_backend": "SimpelStorage"}}, "did you mean SimpleStorage"),
        (
            {"backend": {"Datplane": {"memory": "1GiB"}}},
            "no setting 'backend.Datplane': did you mean backend.Dataplane",
        ),
    ],
)
def test_a_misspelt_backend_is_misuse(queue: Any, given: Any, match: str) -> None:
    """Before anything is made: the next `init` can be right."""
    with pytest.raises(dp.Misuse, match=match):
        queue.init(OmegaConf.create(given))


def test_a_second_job_on_one_ray_is_misuse(queue: Any, nursery: Nursery) -> None:
    """On one Ray: the second is told, and the first goes on."""
    queue.kv_put("a", "train", {"x": torch.ones(3)}, {})
    second = """
        start(os.environ["RAY"])
        told = error_of(lambda: tq.init(conf()))
        ray.shutdown()
        tell(told)
    """
    kind, said = told_by(nursery, second, **ray_of_this_process())
    assert kind == "Misuse"
    assert "is that of Ray job" in said
    assert "start a Ray for each job" in said
    assert "DATAPLANE_ADDRESS" in said
    assert queue.kv_batch_get("a", "train")["x"].values().tolist() == [1, 1, 1]
    queue.kv_clear("a", "train")


@pytest.mark.long
def test_calls_after_a_ray_restart_are_refused_until_reinitialized(nursery: Nursery) -> None:
    code = """
        start()
        tq.init(conf())
        tq.kv_put("a", "p", {"x": torch.ones(2)}, {})
        ray.shutdown()
        start()
        told = [error_of(lambda: tq.kv_batch_get("a", "p")), error_of(lambda: tq.init(conf()))]
        tq.close()
        tq.init(conf())
        tell([told, tq.kv_list()])
        end()
    """
    told, seen = told_by(nursery, code)
    for kind, said in told:
        assert kind == "PeerUnavailable", said
        assert "call transfer_queue.close() and transfer_queue.init()" in said
    assert seen == {}


def test_a_full_disk_budget_is_backpressure_with_a_remedy(queue: Any) -> None:
    """Or what a node may use of it."""
    with pytest.raises(dp.Backpressure, match="the disk budget is full") as raised:
        for number in range(12):
            queue.kv_put(f"k{number}", "full", {"x": torch.full((1 << 20,), number, dtype=torch.uint8)}, {})
    assert "free rows" in str(raised.value)
    assert "more `memory` or `spill`" in str(raised.value)
    queue.get_client().clear_partition("full")


@needs_root
def test_a_node_of_another_user_is_refused_with_a_remedy(nursery: Nursery) -> None:
    """As the job starts."""
    code = """
        import dataplane.client.sync, dataplane.client.connection
        os.setgid(65534); os.setuid(65534)
        tell(error_of(lambda: plugin.start(conf())))
    """
    with dp.connect(config=dp.NodeConfig(memory="8MiB", spill=0, prewarm=0)) as plane:
        kind, said = told_by(nursery, code, DATAPLANE_ADDRESS=plane.address)
    assert kind == "Unauthenticated"
    assert "start a node as this user" in said
