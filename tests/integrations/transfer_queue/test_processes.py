"""Several processes: writers and readers, ranks, data loader's workers; what they are told at the start; who dies."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import dataplane as dp
from tests.integrations.marks import PLANE
from tests.integrations.nursery import Nursery, Process
from tests.processes import eventually

pytestmark = PLANE


_jobs = itertools.count()


@pytest.fixture
def start(nursery: Nursery) -> Callable[..., Process]:
    """Starts a process that runs a program, of the same job as all that a test starts."""
    job = {"DATAPLANE_JOB": f"job-{next(_jobs)}"}
    return lambda program, **environment: nursery.process(textwrap.dedent(program), **{**job, **environment})


@pytest.fixture
def address(node: str) -> Iterator[str]:
    """A node, and nothing on it."""
    yield node
    with dp.connect(node) as plane:
        for name in plane.tables():
            plane.table(name).drop()


def test_settings_of_the_first_process_apply_to_later_processes(address: str, start: Callable[..., Process]) -> None:
    first = """
        tq.init({"controller": {"sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=2), "polling_mode": True},
                 "backend": {"Dataplane": {"dense": False}}})
        client = tq.get_client()
        client.put(TensorDict({"x": torch.ones(3, 2)}, batch_size=[3]), partition_id="p")
        tell("ready"); sys.stdin.readline()
    """
    then = """
        conf = tq.init()
        client = tq.get_client()
        meta = client.get_meta(["x"], 2, "p", task_name="train")
        none = client.get_meta(["x"], 2, "p", task_name="train")
        tell([meta.size, none.size, client.get_data(meta)["x"].is_nested, conf["controller"]["sampler"]])
    """
    with start(first, DATAPLANE_ADDRESS=address) as one:
        one.hear()
        with start(then, DATAPLANE_ADDRESS=address) as other:
            assert other.hear() == [2, 0, True, "GRPOGroupNSampler"]


def test_a_close_in_the_first_process_clears_the_job(address: str, start: Callable[..., Process]) -> None:
    first = """
        tq.init()
        tq.kv_put("a", "p", tag={"x": 1})
        tell(tq.kv_list()); sys.stdin.readline()
        tq.close()
        try:
            tq.kv_put("b", "p", tag={"x": 1})
        except tq.NotStarted as error:
            tell(str(error))
        tq.init()
        tell(tq.kv_list())
    """
    other = """
        tq.init(); seen = tq.kv_list(); tq.close(); tell(seen)
    """
    with start(first, DATAPLANE_ADDRESS=address) as one:
        assert one.hear() == {"p": {"a": {"x": 1}}}
        for _ in range(2):
            with start(other, DATAPLANE_ADDRESS=address) as process:
                assert process.hear() == {"p": {"a": {"x": 1}}}
        one.say()
        assert "call transfer_queue.init() again" in one.hear()
        assert one.hear() == {}


def test_indexes_are_the_same_in_all_processes_after_a_close(address: str, start: Callable[..., Process]) -> None:
    first = """
        def put(name):
            tq.get_client().put(TensorDict({"x": torch.ones(3)}, batch_size=[3]), partition_id=name)
        tq.init(); put("train")
        tell("put"); sys.stdin.readline()
        tq.close(); tq.init()
        put("val"); put("train")
        tell(tq.get_client().get_meta(["x"], mode="force_fetch", partition_id="train").global_indexes)
        sys.stdin.readline()
    """
    other = """
        while True:
            tell(tq.get_client().get_meta(["x"], mode="force_fetch", partition_id="train").global_indexes)
            sys.stdin.readline()
    """
    with start(first, DATAPLANE_ADDRESS=address) as one:
        one.hear()
        with start(other, DATAPLANE_ADDRESS=address) as two:
            two.hear()
            one.say()
            seen = one.hear()
            two.say()
            assert two.hear() == seen


def test_init_without_a_node_starts_one_that_children_share(start: Callable[..., Process]) -> None:
    program = """
        tq.init({"backend": {"Dataplane": {"memory": "32MiB", "spill": 0, "prewarm": 0}}})
        tq.kv_put("a", "p", fields={"x": torch.arange(3)})
        if not os.fork():
            tell(tq.kv_batch_get("a", "p")["x"].tolist())
            os._exit(0)
        os.wait()
        tell(os.environ["DATAPLANE_ADDRESS"])
    """
    with start(program) as process:
        assert process.hear() == [[0, 1, 2]]
        address = process.hear()
        process.wait()
    gone = Path(address.removeprefix("unix://"))
    eventually(lambda: not gone.exists(), "the node ended with the process")


def test_a_data_loader_iterates_over_a_partition(ours: Any, pid: str) -> None:
    ours.get_client().put(
        TensorDict({"x": torch.arange(10), "y": torch.zeros(10, 2)}, batch_size=[10]), partition_id=pid
    )
    dataset = ours.StreamingDataset(
        None, 5, 2, ["x", "y"], pid, "train", dp_rank=0, should_check_consumption_status=True
    )
    loader = ours.StreamingDataLoader(dataset)
    batches = [(data["x"].tolist(), meta.size) for data, meta in loader]
    assert batches == [([0, 1], 2), ([2, 3], 2), ([4], 1), ([5, 6], 2), ([7, 8], 2), ([9], 1)]
    loader.reset()
    assert [data["x"].tolist() for data, _ in loader] == [each for each, _ in batches], "from the buffer"
    assert len(loader.get_buffer()) == 2
    other = f"{pid}-next"
    ours.get_client().put(
        TensorDict({"x": torch.arange(5), "y": torch.zeros(5, 2)}, batch_size=[5]), partition_id=other
    )
    loader.step(other)
    assert [data["x"].tolist() for data, _ in loader] == [[0, 1], [2, 3], [4]]


def test_a_checkpoint_restores_rows_tags_and_consumption_status(ours: Any, pid: str, tmp_path: Path) -> None:
    client = ours.get_client()
    nested = torch.nested.as_nested_tensor([torch.arange(i + 1) for i in range(4)], layout=torch.jagged)
    from tensordict import NonTensorStack

    mm = NonTensorStack({"pix": torch.ones(2, 3), "n": 1}, {}, {"pix": torch.zeros(1, 3)}, None)
    fields = {"n": nested, "d": torch.randn(4, 2).to(torch.bfloat16), "t": NonTensorStack(*"abcd"), "mm": mm}
    keys = ["a", "b", "c", "d"]
    ours.kv_batch_put(keys, pid, TensorDict(fields, batch_size=[4]), tags=[{"i": i} for i in range(4)])
    ours.kv_put("tag only", pid, tag={"status": "running"})
    client.get_meta(["n"], 3, pid, task_name="train")
    other = client.put(TensorDict({"x": torch.arange(6)}, batch_size=[6]), partition_id=f"{pid}-2")
    client.clear_samples(other[:2])
    ours.save_checkpoint(tmp_path / "here", metadata={"step": 7})
    before, listed = ours.kv_batch_get(keys, pid), ours.kv_list(pid)
    ours.kv_clear(["a", "b"], pid)
    ours.kv_put("new", "another", tag={})
    ours.load_checkpoint(tmp_path / "here")
    after = ours.kv_batch_get(keys, pid)
    assert ours.kv_list(pid) == listed
    assert sorted(client.get_partition_list()) == sorted([pid, f"{pid}-2"])
    assert torch.equal(after["d"], before["d"])
    assert [row.tolist() for row in after["n"].unbind()] == [row.tolist() for row in before["n"].unbind()]
    assert after.get("t").tolist() == list("abcd")
    assert after.get("mm").tolist()[1:2] == [{}]
    assert torch.equal(after.get("mm").tolist()[0]["pix"], torch.ones(2, 3))
    assert client.get_consumption_status("train", pid)[1].tolist() == [1, 1, 1, 0, 0]
    left = client.get_meta(["x"], 4, f"{pid}-2", task_name="train")
    assert client.get_data(left)["x"].tolist() == [2, 3, 4, 5]
    assert json.loads((tmp_path / "here" / "metadata.json").read_text())["user_metadata"] == {"step": 7}


def test_a_checkpoint_is_loaded_by_another_job(address: str, start: Callable[..., Process], tmp_path: Path) -> None:
    head = """
        def seen():
            got = tq.kv_batch_get(["a", "b"], "p")
            return [tq.kv_list(), [row.tolist() for row in got["x"].unbind()], got.get("extra").tolist()]
        tq.init()
        client, what = tq.get_client(), {"partition_id": "stages", "task_name": "first"}
    """
    save = f"""
        tq.kv_put("a", "p", {{"x": torch.arange(2.0), "extra": {{"turns": [1, None]}}}}, {{"n": 1}})
        tq.kv_put("b", "p", {{"x": torch.arange(9.0), "extra": None}}, {{"n": 2}})
        tq.kv_put("tag only", "tags", tag={{"status": "running"}})
        client.put(TensorDict({{"x": torch.arange(4)}}, batch_size=[4]), partition_id="stages")
        client.get_meta(["x"], 3, **what)
        tq.save_checkpoint("{tmp_path}/here")
        tell(seen())
        tq.close()
    """
    load = f"""
        tq.kv_put("before", "p", {{"x": torch.arange(100_000)}})
        tq.load_checkpoint("{tmp_path}/here")
        tell(seen())
        from dataplane.integrations import process
        left = client.get_data(client.get_meta(["x"], 1, **what))["x"].tolist()
        tq.kv_put("a", "p", {{"x": torch.arange(3.0)}})
        tell([left, tq.kv_batch_get(["a"], "p", "x")["x"].tolist(), process.plane().stats().memory_used < 400_000])
        tq.close()
    """
    with start(textwrap.dedent(head) + textwrap.dedent(save), DATAPLANE_ADDRESS=address) as first:
        before = first.hear()
        first.wait()
    program = textwrap.dedent(head) + textwrap.dedent(load)
    with start(program, DATAPLANE_ADDRESS=address, DATAPLANE_JOB="another") as second:
        assert second.hear() == before
        assert second.hear() == [[3], [[0.0, 1.0, 2.0]], True]


def meanwhile(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Have this done once, after a reader has got references and before it gets the values."""
    real, left = dp.Plane.get, [work]

    def get(plane: dp.Plane, *args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return real(plane, *args, **kwargs)

    monkeypatch.setattr(dp.Plane, "get", get)


@pytest.mark.parametrize("how", ["by key", "by metadata"])
def test_values_that_are_replaced_while_they_are_read_are_read_again(
    ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ours.kv_put("k", pid, {"x": torch.tensor(1)})
    client = ours.get_client()
    meta = client.get_meta(["x"], 1, pid, task_name="train")
    meanwhile(monkeypatch, lambda: ours.kv_put("k", pid, {"x": torch.tensor(2)}))
    read = ours.kv_batch_get("k", pid) if how == "by key" else client.get_data(meta)
    assert read["x"].tolist() == [2]


def test_a_checkpoint_has_what_changed_while_it_was_written(
    ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours.kv_put("k", pid, {"x": torch.tensor(1)})
    meanwhile(monkeypatch, lambda: ours.kv_put("k", pid, {"x": torch.tensor(2)}))
    ours.save_checkpoint(tmp_path / "replaced")
    meanwhile(monkeypatch, lambda: ours.get_client().clear_partition(pid))
    ours.save_checkpoint(tmp_path / "cleared")
    ours.load_checkpoint(tmp_path / "replaced")
    assert ours.kv_batch_get("k", pid)["x"].tolist() == [2]
    ours.load_checkpoint(tmp_path / "cleared")
    assert pid not in ours.get_client().get_partition_list()


def test_a_checkpoint_contains_fields_added_during_the_save(
    ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours.kv_put("k", pid, tag={"v": 1})
    real, left = dp.Table.look, [lambda: ours.kv_put("k", pid, {"x": torch.tensor(1)})]

    def look(table: dp.Table, *args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return real(table, *args, **kwargs)

    monkeypatch.setattr(dp.Table, "look", look)
    ours.save_checkpoint(tmp_path / "here")
    ours.load_checkpoint(tmp_path / "here")
    assert ours.kv_batch_get("k", pid)["x"].tolist() == [1]


def test_a_checkpoint_takes_the_place_of_an_older_one(ours: Any, pid: str, tmp_path: Path) -> None:
    for value in (1, 2):
        ours.kv_put("a", pid, tag={"v": value})
        ours.save_checkpoint(str(tmp_path / "here"))
    ours.kv_clear("a", pid)
    ours.load_checkpoint(str(tmp_path / "here"))
    assert ours.kv_list(pid) == {pid: {"a": {"v": 2}}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_a_checkpoint_contains_partitions_whose_rows_were_cleared(ours: Any, pid: str, tmp_path: Path) -> None:
    ours.kv_put("a", pid, fields={"x": torch.arange(3)}, tag={"v": 1})
    ours.kv_clear("a", pid)
    ours.save_checkpoint(tmp_path / "here")
    listed, named = ours.kv_list(pid), ours.get_client().get_partition_list()
    ours.load_checkpoint(tmp_path / "here")
    assert ours.kv_list(pid) == listed
    assert ours.get_client().get_partition_list() == named
    ours.kv_put("b", pid, fields={"x": torch.arange(2)}, tag={"v": 2})
    assert ours.kv_list(pid) == {pid: {"b": {"v": 2}}}


def test_a_checkpoint_contains_values_even_without_include_storage(
    ours: Any, pid: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with TransferQueue's own storage, whose values are in memory too."""
    ours.kv_put("a", pid, fields={"x": torch.arange(3)}, tag={"v": 1})
    ours.save_checkpoint(tmp_path / "here", include_storage=False)
    assert "include_storage=False has no effect" in caplog.text
    ours.kv_clear("a", pid)
    ours.load_checkpoint(tmp_path / "here")
    assert ours.kv_batch_get(["a"], pid)["x"].tolist() == [[0, 1, 2]]


def test_a_checkpoint_is_saved_on_a_node_with_less_memory_than_a_page(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    program = f"""
        tq.init({{"backend": {{"Dataplane": {{"memory": "8MiB", "spill": "64MiB", "prewarm": 0}}}}}})
        for row in range(6):
            tq.kv_put(str(row), "p", {{"x": torch.full((1 << 20,), float(row))}})
        tq.save_checkpoint("{tmp_path}/here")
        tq.kv_clear([str(row) for row in range(6)], "p")
        tq.load_checkpoint("{tmp_path}/here")
        tell([float(tq.kv_batch_get(str(row), "p")["x"][0][0]) for row in range(6)])
    """
    with start(program) as process:
        assert process.hear() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_missing_checkpoint_is_a_file_not_found_error(ours: Any, pid: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ours.load_checkpoint(tmp_path / "never")


def test_an_altered_checkpoint_is_corrupt_and_changes_nothing(ours: Any, pid: str, tmp_path: Path) -> None:
    here, older = tmp_path / "here" / "dataplane.rows", tmp_path / "older" / "dataplane.rows"
    for file, shift in ((older, 100), (here, 0)):
        for name in ("one", "two"):
            first = shift + len(name + pid) + 10 * (name == "two")
            ours.kv_put("a", f"{pid}-{name}", fields={"x": torch.arange(first, first + 3)}, tag={"v": first})
        ours.save_checkpoint(file.parent)
    whole, half = here.read_bytes(), len(here.read_bytes()) // 2
    before = ours.kv_batch_get(["a"], f"{pid}-one")["x"]
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    last = whole[:-24]  # without the frame of the end
    for changed in (whole[:-1], flipped, last, whole[:half] + older.read_bytes()[half:], b"{}"):
        here.write_bytes(changed)
        with pytest.raises(dp.Corrupt) as error:
            ours.load_checkpoint(here.parent)
        assert error.value.path == str(here)
        assert torch.equal(ours.kv_batch_get(["a"], f"{pid}-one")["x"], before)
    here.write_bytes(whole)
    ours.load_checkpoint(here.parent)
    assert torch.equal(ours.kv_batch_get(["a"], f"{pid}-one")["x"], before)
