"""Small indexes, the configuration, and the job's figures."""

from __future__ import annotations

import os
import socket
import textwrap
import urllib.request
from importlib import resources
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue.session import session
from tests.integrations.marks import KEPT
from tests.integrations.nursery import Nursery

pytestmark = KEPT


def batch(rows: int) -> TensorDict:
    return TensorDict({"x": torch.arange(rows)}, batch_size=[rows])


def test_row_indexes_are_small_integers_in_each_job(nursery: Nursery, node: str) -> None:
    code = """
        told = []
        for job in ("indexes one", "indexes two"):
            tq.init(job=job)
            client = tq.get_client()
            put = lambda name, rows: client.put(
                TensorDict({"x": torch.zeros(rows)}, batch_size=[rows]), partition_id=name).global_indexes
            told.append([put("p", 3), put("q", 2), put("p", 600), put("q", 1)])
            tq.close()
        tell(told)
    """
    with nursery.process(textwrap.dedent(code), DATAPLANE_ADDRESS=node, DATAPLANE_JOB="") as process:
        for p, q, more, last in process.hear():
            assert (p, q, last) == ([0, 1, 2], [256, 257], [258])
            assert len(set(p + q + more + last)) == 606
            assert max(more) < 1024


def test_row_indexes_denote_the_same_rows_in_every_process(ours: Any, nursery: Nursery, node: str, pid: str) -> None:
    client = ours.get_client()
    one = client.put(batch(300), partition_id=f"{pid}-one")
    other = client.put(batch(300), partition_id=f"{pid}-other")
    assert not set(one.global_indexes) & set(other.global_indexes)
    asked = [*other.global_indexes[::50], *one.global_indexes[:2]]
    code = f"""
meta = tq.BatchMeta({asked}, ["{pid}-other"] * 6 + ["{pid}-one"] * 2, {{"x": {{}}}})
tell([tq.get_client().get_data(meta)["x"].flatten().tolist(),
      tq.get_client().get_meta(["x"], partition_id="{pid}-other", mode="force_fetch").global_indexes])
"""
    told = {"DATAPLANE_ADDRESS": node, "DATAPLANE_JOB": os.environ["DATAPLANE_JOB"]}
    with nursery.process(code, **told) as process:
        values, indexes = process.hear()
    assert values == [0, 50, 100, 150, 200, 250, 0, 1]
    assert indexes == other.global_indexes


def test_an_index_of_another_partition_denotes_no_row(ours: Any, pid: str) -> None:
    client = ours.get_client()
    one = client.put(batch(2), partition_id=f"{pid}-one")
    client.put(batch(2), partition_id=f"{pid}-other")
    for index in (one.global_indexes[0], 10**9):
        with pytest.raises(KeyError, match=str(index)):
            client.get_data(ours.BatchMeta([index], [f"{pid}-other"], {"x": {}}))
    client.clear_samples(ours.BatchMeta(one.global_indexes, [f"{pid}-other"] * 2))
    assert client.get_meta(["x"], partition_id=f"{pid}-other", mode="force_fetch").size == 2


def test_metadata_says_that_rows_of_a_field_differ_in_shape(ours: Any, pid: str) -> None:
    client = ours.get_client()

    def nested_after_put(width: int) -> Any:
        client.put(TensorDict({"x": torch.ones(2, width)}, batch_size=[2]), partition_id=pid)
        return client.get_meta(["x"], partition_id=pid, mode="force_fetch").field_schema["x"]["is_nested"]

    assert [nested_after_put(width) for width in (4, 4, 6)] == [False, False, True]
    client.clear_partition(pid)
    assert nested_after_put(6) is False


def test_the_snapshot_of_a_partition_has_its_keys_and_produced_fields(ours: Any, pid: str) -> None:
    ours.kv_batch_put(["a", "b"], pid, fields=batch(2), tags=[{"n": 1}, {"n": 2}])
    ours.kv_put("b", pid, fields={"y": torch.ones(3)})
    held = session().partition(pid).snapshot()
    assert held is not None
    columns = [held.field_name_mapping[name] for name in ("x", "y")]
    found = {key: held.production_status[index, columns].tolist() for key, index in held.keys_mapping.items()}
    assert found == {"a": [1, 0], "b": [1, 1]}
    assert [held.custom_meta[held.keys_mapping[key]] for key in "ab"] == [{"n": 1}, {"n": 2}]
    assert held.global_indexes == set(held.revert_keys_mapping)


def test_init_accepts_the_packaged_configuration_of_transfer_queue(ours: Any) -> None:
    conf = OmegaConf.load(resources.files("transfer_queue") / "config.yaml")
    agreed = ours.init(conf)
    assert agreed.controller.sampler == conf.controller.sampler
    assert agreed.backend.storage_backend == "Dataplane"


def test_job_metrics_are_served_to_all_processes_until_close(nursery: Nursery, node: str) -> None:
    code = """
tq.init({"metrics": {"enabled": True}}, job="served")
tq.get_client().put(TensorDict({"x": torch.zeros(4)}, batch_size=[4]), partition_id="p")
tq.get_client().get_meta(["x"], 1, "p", task_name="train")
if not os.fork():
    tq.kv_list()
    tq.close()  # which ends nothing of its parent's, and waits for none
    os._exit(0)
os.wait()
tell(tq.get_metrics_endpoint()); sys.stdin.readline()
tq.close()
tell(tq.get_metrics_endpoint())
"""
    told = {"DATAPLANE_ADDRESS": node, "DATAPLANE_JOB": "served"}
    with nursery.process(code, **told) as process:
        endpoint = process.hear()
        with nursery.process("tell(tq.get_metrics_endpoint())", **told) as other:
            assert other.hear() == endpoint
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        process.say()
        assert process.hear() is None
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert figures['tq_partition_samples_total{partition_id="p"}'] == "4.0"
    assert figures['tq_partition_consumption_progress{partition_id="p",task_name="train"}'] == "0.25"
    assert float(figures["dataplane_memory_budget"]) > 0


def test_served_metrics_are_those_of_the_last_joined_job(nursery: Nursery, node: str) -> None:
    code = """
for job in ("joined first", "joined last"):
    tq.init({"metrics": {"enabled": True}}, job=job)
    tq.kv_put("k", f"of the job {job}", tag={})
tell(tq.get_metrics_endpoint()); sys.stdin.readline()
"""
    with nursery.process(code, DATAPLANE_ADDRESS=node) as process:
        endpoint = process.hear()
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        process.say()
    assert 'tq_partition_samples_total{partition_id="of the job joined last"} 1.0' in page
    assert "of the job joined first" not in page


def test_an_occupied_metrics_port_is_misuse(ours: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Misuse, match=r"metrics\.port"):
        ours.init({"metrics": {"enabled": True, "port": taken.getsockname()[1]}})
