"""Values against those of TransferQueue's own storage: kinds, dtypes, shapes and bits of what comes back.

One after another, TransferQueue's storage and this package take all cases, each on Ray; then each case is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

import dataplane as dp
from tests.integrations.marks import SYSTEMS
from tests.integrations.verl import driving, inputs, storage_job
from tests.integrations.verl.inputs import CASES, Case, look
from tests.processes import eventually

pytestmark = SYSTEMS

SETTINGS = {"memory": "256MiB", "spill": 0, "prewarm": 0}
Seen = dict[str, dict[str, Any]]


class Run(NamedTuple):
    """What came back of all cases; of images that were put as they were opened, the bytes of their files."""

    seen: Seen
    files: list[bytes | None]


@contextmanager
def simple_storage() -> Iterator[Any]:
    import transfer_queue as queue

    driving.drive()
    queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        yield queue
    finally:
        queue.close()
        eventually(lambda: not storage_job.controlled(), "its controller has ended")


def seen(queue: Any, cases: dict[str, Case]) -> Seen:
    return {name: inputs.seen(queue, case, f"p{number}") for number, (name, case) in enumerate(cases.items())}


def run(queue: Any) -> Run:
    return Run(seen(queue, CASES), files_seen(queue))


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


@pytest.fixture(scope="module")
def theirs() -> Run:
    with simple_storage() as queue:
        return run(queue)


@pytest.fixture(scope="module")
def ours(theirs: Run) -> Run:
    with storage_job.job(**SETTINGS) as queue:
        return run(queue)


def expected(case: Case, name: str, rows: list[Any]) -> Any:
    """What this package gives back of rows that are these."""
    from dataplane.batch.tensordicts import stacked

    return look(stacked([rows[row] for row in inputs.reads(case)[name]]))


def check(case: Case, real: dict[str, Any], ours: dict[str, Any]) -> None:
    """Fails where it is not what TransferQueue gives, or what the case says."""
    if case.refused:
        error = ours.get("error")
        assert isinstance(error, dp.DataplaneError), ours
        assert re.search(case.refused, str(error)), error
        assert "'x'" in str(error), "it names the field"
    elif case.keeps is not None:
        rows = case.keeps()
        assert ours == {name: expected(case, name, rows) for name in inputs.reads(case)}
        assert (real == ours) == case.alike, "whether TransferQueue does the same"
    else:
        assert "error" not in real, real
        assert ours == real


@pytest.mark.parametrize("name", CASES)
def test_values_read_equal_those_of_transfer_queue(theirs: Run, ours: Run, name: str) -> None:
    check(CASES[name], theirs.seen[name], ours.seen[name])


def test_image_file_bytes_are_preserved(ours: Run) -> None:
    assert ours.files == FILES


UPDATES = {case.name: case for case in inputs._updates() if not case.keeps}


@pytest.fixture(scope="module")
def dense(ours: Run) -> Seen:
    with storage_job.job(**SETTINGS, dense=True) as queue:
        return seen(queue, UPDATES)


@pytest.mark.parametrize("name", UPDATES)
def test_only_rows_put_dense_are_read_dense(theirs: Run, dense: Seen, name: str) -> None:
    case = UPDATES[name]
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
