"""TransferQueue's tutorials, unchanged, as its package brings them, with `dataplane` in its place by one
line before; and the steps of its notebook, which the package does not bring.

Each tutorial starts Ray itself, once or for each of its parts. Its checks are its own; besides, what it says that it
was given is compared.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray", reason="needs Ray: make test-integrations")
pytest.importorskip("transfer_queue", reason="needs TransferQueue: make test-integrations")

from tensordict import NonTensorStack, TensorDict  # noqa: E402

from tests.integrations.marks import PLANE  # noqa: E402
from tests.integrations.nursery import Nursery  # noqa: E402

pytestmark = [pytest.mark.timeout(300), *PLANE]

ROOT = Path(__file__).parents[3]
DONE = "Tutorial Complete!"
GIVEN = re.compile(r"Got samples(?: \(high priority\))?: \[(.*?)\]")

RUN = """
import contextlib, io, runpy
tq.install()
sys.argv[:] = {arguments!r}
said = io.StringIO()
with contextlib.redirect_stdout(said):
    runpy.run_path({path!r}, run_name="__main__")
    import ray
    ray.shutdown()  # after which all that workers said is there
tell(said.getvalue())
"""


@pytest.fixture
def run(nursery: Nursery) -> Callable[..., str]:
    """Runs a file of TransferQueue's package in a process of its own; what it and its workers print."""
    found = {str(each): each.locate() for each in importlib.metadata.files("TransferQueue") or ()}

    def result(name: str, *arguments: str) -> str:
        path = str(found[name])
        environment = dict.fromkeys(("DATAPLANE_ADDRESS", "DATAPLANE_JOB", "DATAPLANE_TRANSFER_QUEUE"), "")
        environment |= {"RAY_ADDRESS": "local", "RAY_enable_worker_prestart": "0"}  # or it is another test's Ray
        code = RUN.format(path=path, arguments=[path, *arguments])
        with nursery.process(code, PYTHONPATH=str(ROOT), **environment) as process:
            said: str = process.hear()
        return said

    return result


def given(said: str) -> list[list[int]]:
    """The samples that a tutorial says it got, call by call."""
    return [[int(each) for each in found.split(",")] for found in GIVEN.findall(said)]


def test_core_components(run: Callable[..., str]) -> None:
    said = run("tutorial/01_core_components.py")
    assert DONE in said
    assert "Global indexes: [0, 1, 2, 3]" in said


def test_the_key_value_interface(run: Callable[..., str]) -> None:
    said = run("tutorial/02_kv_interface.py")
    assert DONE in said
    assert "key='1_1' | tag={'global_steps': 1, 'status': 'finish', 'model_version': 1}" in said
    assert "key='0_0' | tag={'global_steps': 0, 'status': 'finish', 'model_version': 0}" in said
    assert "retrieved only ['input_ids'] field" in said
    assert "Fields: ['attention_mask', 'input_ids']" in said, "those that all rows have"
    assert "Remaining keys in partition: ['1_1', '1_2', '2_0']" in said


def test_metadata(run: Callable[..., str]) -> None:
    said = run("tutorial/03_metadata_concepts.py")
    assert DONE in said
    assert "Global indexes in new BatchMeta: [0, 2, 4, 6]" in said
    assert "Chunk 1: 4 samples, indexes=[4, 5, 6, 7]" in said


def test_the_controller(run: Callable[..., str]) -> None:
    said = run("tutorial/04_understanding_controller.py")
    assert DONE in said
    assert given(said) == [[0, 1, 2], [3, 4, 5], [0, 1]]


def test_samplers_of_ones_own(run: Callable[..., str]) -> None:
    said = run("tutorial/05_custom_sampler.py")
    assert DONE in said
    replaced, once, by_priority = given(said)[:3], given(said)[3:6], given(said)[6:]
    assert [len(each) for each in replaced] == [2, 1, 2]
    assert sorted(chain(*once)) == list(range(6)), "each once"
    assert {*chain(*by_priority)} <= {2, 3, 7}, "all others are of a weight of 1 in 10,000"


def test_the_streaming_loader(run: Callable[..., str]) -> None:
    """Two producers, and two ranks with two members each, whose loaders have two workers."""
    said = run("tutorial/06_streaming_dataloader.py")
    assert DONE in said
    seen: dict[str, list[str]] = {}
    ranks: dict[str, str] = {}
    for worker, rank, samples in re.findall(r"Update Worker@(\d)\]: dp_rank (\d) retrieved samples: \[(.*?)\]", said):
        seen.setdefault(worker, []).append(samples)
        ranks[worker] = rank
    assert ranks == {"0": "0", "1": "0", "2": "1", "3": "1"}
    assert all(len(samples) == 5 for samples in seen.values())
    assert sorted(seen["0"]) == sorted(seen["1"]), "members of a rank have the same samples"
    assert sorted(seen["2"]) == sorted(seen["3"])
    assert not {*seen["0"]} & {*seen["2"]}, "ranks share none"


def jagged(*rows: Any) -> Any:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def test_the_steps_of_the_notebook(tq: Any, pid: str) -> None:
    """With TransferQueue itself too: what it shows is what both give."""
    tq.kv_put("one", pid, fields={"ids": torch.tensor([1, 2, 3, 4])}, tag={"from": "a dict", "score": 0.95})
    row = TensorDict({"ids": torch.tensor([[5, 6, 7, 8]]), "mask": torch.ones(1, 4, dtype=torch.long)}, batch_size=1)
    tq.kv_put("two", pid, fields=row, tag={"from": "a TensorDict", "score": 0.88})
    keys = ["b0", "b1", "b2"]
    rows = torch.tensor([[10, 20], [30, 40], [50, 60]])
    batch = TensorDict({"ids": rows, "mask": torch.ones(3, 2, dtype=torch.long)}, batch_size=3)
    tq.kv_batch_put(keys=keys, partition_id=pid, fields=batch, tags=[{"place": place} for place in range(3)])

    assert [each.tolist() for each in tq.kv_batch_get(keys="one", partition_id=pid)["ids"]] == [[1, 2, 3, 4]]
    found = tq.kv_batch_get(keys=keys, partition_id=pid)
    assert [each.tolist() for each in found["ids"]] == rows.tolist()
    assert [each.tolist() for each in found["mask"]] == [[1, 1]] * 3
    tags = {"one": {"from": "a dict", "score": 0.95}, "two": {"from": "a TensorDict", "score": 0.88}}
    assert tq.kv_list(partition_id=pid) == {pid: tags | {f"b{place}": {"place": place} for place in range(3)}}
    assert tq.kv_batch_get(keys=["b0", "b2"], partition_id=pid)["ids"].shape[0] == 2
    assert [*tq.kv_batch_get(keys="two", partition_id=pid, select_fields="ids").keys()] == ["ids"]
    both = tq.kv_batch_get(keys="two", partition_id=pid, select_fields=["ids", "mask"])
    assert {*both.keys()} == {"ids", "mask"}

    more = TensorDict({"response": torch.tensor([[100, 200], [300, 400], [500, 600]])}, batch_size=3)
    tq.kv_batch_put(keys=keys, partition_id=pid, fields=more)
    found = tq.kv_batch_get(keys=keys, partition_id=pid)
    assert {*found.keys()} == {"ids", "mask", "response"}
    assert [each.tolist() for each in found["response"]] == [[100, 200], [300, 400], [500, 600]]


def test_the_steps_of_the_notebook_with_rows_of_other_shapes(tq: Any, pid: str) -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    responses = [torch.tensor([10, 11, 12]), torch.tensor([20]), torch.tensor([30, 31])]
    keys = ["n0", "n1", "n2"]
    fields = TensorDict({"ids": ids, "response": jagged(*responses)}, batch_size=3)
    tq.kv_batch_put(keys=keys, partition_id=pid, fields=fields, tags=[{"length": n} for n in (3, 1, 2)])
    found = tq.kv_batch_get(keys=["n0", "n2"], partition_id=pid)
    assert torch.equal(found["response"][0], responses[0])
    assert torch.equal(found["response"][1], responses[2])

    hidden = [torch.randn(heads, 3, 4) for heads in (2, 5, 1)]
    deep = ["d0", "d1", "d2"]
    tq.kv_batch_put(deep, pid, fields=TensorDict({"ids": ids, "hidden": jagged(*hidden)}, batch_size=3))
    found = tq.kv_batch_get(keys=deep, partition_id=pid)
    assert all(torch.equal(*pair) for pair in zip(found["hidden"], hidden, strict=True))
    tq.kv_clear(keys=keys, partition_id=pid)
    tq.kv_clear(keys=deep, partition_id=pid)

    images = [[torch.randn(3, 32, 32), torch.randn(3, 64, 64)], [torch.randn(3, 48, 48)], [torch.randn(3, 16, 24)] * 3]
    pixels = jagged(*(torch.cat([image.flatten() for image in row]) for row in images))
    shapes = jagged(*(torch.tensor([image.shape for image in row]) for row in images))
    fields = TensorDict({"prompt": ids, "pixels": pixels, "shapes": shapes}, batch_size=3)
    tq.kv_batch_put(keys=keys, partition_id=pid, fields=fields, tags=[{"images": len(row)} for row in images])
    found = tq.kv_batch_get(keys=keys, partition_id=pid)
    for place, row in enumerate(images):
        sizes = [tuple(shape.tolist()) for shape in found["shapes"][place]]
        parts = found["pixels"][place].split([image.numel() for image in row])
        assert all(torch.equal(part.view(size), image) for part, size, image in zip(parts, sizes, row, strict=True))
    tq.kv_clear(keys=keys, partition_id=pid)


def test_the_steps_of_the_notebook_with_what_is_no_tensor(tq: Any, pid: str) -> None:
    keys = ["t0", "t1", "t2"]
    texts, facts = ["Summarise this.", "Translate:", "Write:"], [{"from": "wiki"}, {"from": "books"}, {"from": "user"}]
    fields = {"text": NonTensorStack(*texts), "facts": NonTensorStack(*facts), "ids": torch.arange(9).view(3, 3)}
    tq.kv_batch_put(keys=keys, partition_id=pid, fields=TensorDict(fields, batch_size=3))
    found = tq.kv_batch_get(keys=keys, partition_id=pid)
    assert (list(found["text"]), list(found["facts"])) == (texts, facts)
    tq.kv_put("alone", pid, fields={"label": NonTensorStack("positive"), "score": torch.tensor([0.99])})
    assert list(tq.kv_batch_get(keys="alone", partition_id=pid)["label"]) == [["positive"]]

    shapes = [(place % 4 + 1, place % 3 + 2) for place in range(32)]

    def parse(columns: dict[str, Any]) -> dict[str, Any]:
        async def one(url: str) -> Any:
            await asyncio.sleep(0)
            kind, size = url.split(":")
            return torch.ones([int(each) for each in size.split("x")], dtype=getattr(torch, kind))

        async def together(urls: list[str]) -> list[Any]:
            return await asyncio.gather(*map(one, urls))

        columns["from_urls"] = asyncio.run(together(columns["from_urls"]))
        return columns

    normal = torch.randn(32, 2)
    urls = NonTensorStack(*(f"float32:{height}x{width}" for height, width in shapes))
    fields = TensorDict({"normal": normal, "from_urls": urls}, batch_size=32)
    many = [f"p{place}" for place in range(32)]
    meta = tq.kv_batch_put(keys=many, partition_id=pid, fields=fields, data_parser=parse)
    assert {*meta.fields} == {"normal", "from_urls"}
    found = tq.kv_batch_get(keys=many, partition_id=pid)
    assert all(torch.equal(*pair) for pair in zip(found["normal"], normal, strict=True))
    assert [tuple(found["from_urls"][place].shape) for place in range(32)] == shapes
    assert found["from_urls"][0].dtype == torch.float32

    for cleared in ("alone", keys, many):
        tq.kv_clear(keys=cleared, partition_id=pid)
    assert not tq.kv_list().get(pid)
