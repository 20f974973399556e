"""Values through both doors, against TransferQueue's own storage: kinds, dtypes, shapes and bits of what comes back.

One after another, TransferQueue's storage on Ray, the backend and the module of its calls take all cases; then each
case is compared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

import dataplane as dp
from tests.processes import eventually

pytest.importorskip("ray", reason="needs Ray: make test-integrations")
pytest.importorskip("transfer_queue", reason="needs TransferQueue: make test-integrations")
pytest.importorskip("torch")
pytest.importorskip("PIL")

import torch
from tensordict import NonTensorStack, TensorDict

from tests.integrations.verl import driving, inputs, storage_job
from tests.integrations.verl.inputs import CASES, Case, look

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.leaks(reason="Ray and TransferQueue keep threads and descriptors for as long as the process lives"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

Seen = dict[str, dict[str, Any]]


class Run(NamedTuple):
    """What came back of all cases; of images that were put as they were opened, the bytes of their files; how long 64
    rows with images took to be put and got."""

    seen: Seen
    files: list[bytes | None]
    seconds: float


@contextmanager
def simple_storage() -> Iterator[Any]:
    import transfer_queue as queue

    driving.drive()
    queue.init()
    try:
        yield queue
    finally:
        queue.close()
        eventually(lambda: not storage_job.controlled(), "its controller has ended")


@contextmanager
def module(*, dense: bool = False) -> Iterator[Any]:
    from dataplane.integrations import transfer_queue as queue

    with driving.alone(dp.NodeConfig(memory="256MiB", spill=0, prewarm=0)):
        queue.init({"backend": {"Dataplane": {"dense": dense}}})
        try:
            yield queue
        finally:
            queue.close()


def run(queue: Any) -> Run:
    seen = {name: inputs.seen(queue, case, f"p{number}") for number, (name, case) in enumerate(CASES.items())}
    return Run(seen, files_seen(queue), seconds(queue))


FILES = [inputs.file("PNG", 64), inputs.file("JPEG", 64), inputs.file("PNG")]


def files_seen(queue: Any) -> list[bytes | None]:
    """The bytes of the files of images that were put in a prompt, in a dict, and by themselves."""
    whole, small, one = map(inputs.opened, FILES)
    fields = TensorDict(
        {
            "prompt": NonTensorStack(inputs.messages(whole)),
            "multi_modal_data": NonTensorStack({"image": [small]}),
            "image": NonTensorStack(one),
        },
        batch_size=[1],
    )
    queue.kv_batch_put(["a"], "files", fields=fields)
    got = queue.kv_batch_get(["a"], "files")
    queue.get_client().clear_partition("files")
    images = [
        got.get("prompt").tolist()[0][1]["content"][0]["image"],
        got.get("multi_modal_data").tolist()[0]["image"][0],
        got.get("image").tolist()[0],
    ]
    return [None if getattr(image, "fp", None) is None else image.fp.getvalue() for image in images]


def seconds(queue: Any) -> float:
    """The shortest of five times to put and get eight responses to each of eight prompts with an image."""
    files = [inputs.file("PNG", 448, seed) for seed in range(8)]
    keys, taken = [f"k{row}" for row in range(64)], []
    for number in range(5):
        images = [inputs.opened(file) for file in files]
        fields = TensorDict(
            {
                "prompt": NonTensorStack(*[inputs.messages(images[row // 8]) for row in range(64)]),
                "multi_modal_data": NonTensorStack(*[{"image": [images[row // 8]]} for row in range(64)]),
                "responses": torch.ones(64, 256, dtype=torch.int64),
            },
            batch_size=[64],
        )
        began = time.perf_counter()
        queue.kv_batch_put(keys, f"timed{number}", fields=fields)
        got = queue.kv_batch_get(keys, f"timed{number}")
        taken.append(time.perf_counter() - began)
        assert got.get("multi_modal_data").tolist()[63]["image"][0].size == (448, 448)
        queue.get_client().clear_partition(f"timed{number}")
    return min(taken)


@pytest.fixture(scope="module")
def theirs() -> Run:
    with simple_storage() as queue:
        return run(queue)


@pytest.fixture(scope="module")
def backend(theirs: Run) -> Run:
    with storage_job.job(memory="256MiB", spill=0, prewarm=0) as queue:
        return run(queue)


@pytest.fixture(scope="module")
def calls(backend: Run) -> Run:
    with module() as queue:
        return run(queue)


def expected(case: Case, name: str, rows: list[Any]) -> Any:
    """What this package gives back of rows that are these."""
    from dataplane.batch.tensordicts import stacked

    return look(stacked([rows[row] for row in inputs.reads(case)[name]]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("door", ["backend", "calls"])
def test_what_comes_back_is_what_transferqueue_gives(
    request: pytest.FixtureRequest, theirs: Run, door: str, name: str
) -> None:
    case, real, ours = CASES[name], theirs.seen[name], request.getfixturevalue(door).seen[name]
    refused = case.refused if isinstance(case.refused, str) else case.refused.get(door, "")
    if refused:
        error = ours.get("error")
        assert isinstance(error, dp.DataplaneError), ours
        assert re.search(refused, str(error)), error
        assert isinstance(error, dp.Rejected) or "'x'" in str(error), "it names the field"
    elif case.keeps is not None:
        rows = case.keeps()
        assert ours == {name: expected(case, name, rows) for name in inputs.reads(case)}
        assert (real == ours) == case.alike, "whether TransferQueue does the same"
    else:
        assert "error" not in real, real
        assert ours == real


@pytest.mark.parametrize("door", ["backend", "calls"])
def test_images_keep_the_bytes_of_their_files(request: pytest.FixtureRequest, door: str) -> None:
    assert request.getfixturevalue(door).files == FILES


@pytest.mark.parametrize("door", ["backend", "calls"])
def test_rows_with_images_take_no_longer_than_with_transferqueues_storage(
    request: pytest.FixtureRequest, record_property: Any, theirs: Run, door: str
) -> None:
    ratio = theirs.seconds / request.getfixturevalue(door).seconds
    record_property("ratio", ratio)
    assert ratio > 1, f"{theirs.seconds * 1e3:.0f} ms with SimpleStorage"


def of_tensors(case: Case) -> bool:
    return case.name in {each.name for each in inputs._updates()} and not case.keeps


@pytest.fixture(scope="module")
def dense(calls: Run) -> Seen:
    with module(dense=True) as queue:
        return {case.name: inputs.seen(queue, case, case.name) for case in CASES.values() if of_tensors(case)}


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if of_tensors(case)])
def test_only_rows_that_were_put_dense_come_back_dense(theirs: Run, dense: Seen, name: str) -> None:
    """... where they are of one shape, and whatever other rows of the field are."""
    case = CASES[name]
    latest: dict[int, Any] = {}
    for rows, entry in case.puts:
        for row in rows or ():
            latest[row] = entry()
    for how, rows in inputs.reads(case).items():
        real, ours = theirs.seen[name][how], dense[name][how]
        if real[0] != "nested":
            assert ours == real
            continue
        puts = [latest[row] for row in rows]
        shapes = {shape for *_, shape, _, _ in real[4]}
        even = len(shapes) == 1 and all(hasattr(put, "is_nested") and not put.is_nested for put in puts)
        assert (ours[0] != "nested") == even, how
        if even:
            assert ours[2] == (len(rows), *shapes.pop())
            assert ours[4] == b"".join(row[4] for row in real[4])
        else:
            assert ours == real
