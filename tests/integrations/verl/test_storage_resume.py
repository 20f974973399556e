"""A checkpoint with rows in the plane: saved in one job of a Ray, which ends, and loaded in another."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.marks import KEPT
from tests.integrations.nursery import Nursery, Process
from tests.integrations.verl import driving
from tests.integrations.verl.storage_job import program, ray_of_this_process

pytestmark = KEPT

#: What the jobs put and see.
ROWS = """
STRUCTURE = {"turns": [1, None], "tools": ("a", b"b")}

def fields(number):
    return {
        "ids": torch.arange(number + 2),
        "scores": torch.full((3, number + 1), number / 2, dtype=torch.bfloat16),
        "reward": torch.tensor(float(number)),
        "text": f"row {number}" if number % 2 else None,
        "extra": STRUCTURE,
        "mm": {"pixels": torch.full((number + 1, 4), float(number))} if number % 2 else {},
    }

def seen(partition="train"):
    keys = sorted(tq.kv_list(partition)[partition])
    got = tq.kv_batch_get(keys, partition)
    found = {key: {} for key in keys}
    for name in sorted(got.keys()):
        entry = got.get(name)
        rows = entry.unbind() if isinstance(entry, torch.Tensor) else entry.tolist()
        for key, row in zip(keys, rows):
            found[key][name] = repr((type(row), row.dtype, row.tolist()) if isinstance(row, torch.Tensor) else row)
    return found

start(os.environ["RAY"])
eventually(lambda: not ray.util.list_named_actors(all_namespaces=True), "the job before has ended")
tq.init(conf())
"""

SAVE = """
    for number in range(6):
        tq.kv_put(f"k{number}", "train", fields(number), {"status": "done", "number": number})
    tq.kv_put("k2", "train", {"ids": torch.arange(9)}, {"status": "again", "number": 2})
    late = TensorDict({"late": torch.arange(12).view(6, 2)}, batch_size=6)
    tq.kv_batch_put([f"k{number}" for number in range(6)], "train", late)
    tq.kv_put("prompt", "prompts", {"prompt": "what is it?"}, {"is_prompt": True, "status": "pending"})
    tq.kv_put("tag only", "tags", tag={"status": "running"})
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(8).view(4, 2)}, batch_size=4), partition_id="stages")
    taken = client.get_meta(["x"], 3, "stages", "fetch", "first")
    tq.save_checkpoint(os.environ["WHERE"], metadata={"step": 7})
    tell([seen(), seen("prompts"), tq.kv_list(), client.get_consumption_status("first", "stages")[1].tolist()])
    end()
"""

LOAD = """
    tq.kv_put("before", "train", {"ids": torch.arange(100_000)}, {})
    tq.load_checkpoint(os.environ["WHERE"])
    client = tq.get_client()
    tell([seen(), seen("prompts"), tq.kv_list(), client.get_consumption_status("first", "stages")[1].tolist()])
    assert used() < 400_000, "what was there before is freed"
    left = client.get_data(client.get_meta(["x"], 1, "stages", "fetch", "first"))
    tell([row.tolist() for row in left["x"].unbind()])

    # It goes on: more rows, fields of the old ones, and all of them cleared.
    tq.kv_put("k2", "train", {"ids": torch.arange(3)}, {"status": "new"})
    tq.kv_put("k9", "train", fields(9), {})
    assert tq.kv_batch_get(["k2"], "train", "ids")["ids"].values().tolist() == [0, 1, 2]
    tq.save_checkpoint(os.environ["WHERE"])
    tq.load_checkpoint(os.environ["WHERE"])
    tell(seen()["k9"])
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    del left
    eventually(lambda: used() < 100_000, "nothing is left of two runs")
    tell("nothing")
    end()
"""


def run(nursery: Nursery, code: str, where: Path, **environment: str) -> Process:
    driving.drive()
    return program(nursery, ROWS + textwrap.dedent(code), WHERE=str(where), **ray_of_this_process(), **environment)


@pytest.fixture(scope="module")
def driven() -> None:
    """Starts a Ray, which sets variables of the environment that the nursery has to begin with."""
    driving.drive()


@pytest.fixture(scope="module")
def saved(driven: None, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of a job that has ended, and what was in it."""
    where = tmp_path_factory.mktemp("saved") / "checkpoint"
    with run(nursery, SAVE, where) as running:
        told = running.hear()
        running.wait()
        said = running.logged()
    assert said.count("dataplane: TransferQueue stores in the plane (Dataplane)") == 1, "it is seen"
    return where, told


def test_a_checkpoint_is_loaded_by_another_job(saved: tuple[Path, Any], nursery: Nursery, tmp_path: Path) -> None:
    where, before = saved
    copied = shutil.copytree(where, tmp_path / "checkpoint")
    with run(nursery, LOAD, copied) as running:
        assert running.hear() == before
        assert len(running.hear()) == 1, "the row that nobody had taken"
        assert running.hear().keys() == {"ids", "scores", "reward", "text", "extra", "mm"}
        assert running.hear() == "nothing"
        running.wait()
