"""Values through both doors, against TransferQueue's own storage: kinds, dtypes, shapes and bits of what comes back.

One after another, TransferQueue's storage on Ray, the backend and the module of its calls take all cases; then each
case is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dataplane as dp
from tests.processes import eventually

pytest.importorskip("ray", reason="needs Ray: make test-integrations")
pytest.importorskip("transfer_queue", reason="needs TransferQueue: make test-integrations")
pytest.importorskip("torch")

from tests.integrations.verl import driving, inputs, storage_job
from tests.integrations.verl.inputs import CASES, Case, look

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.leaks(reason="Ray and TransferQueue keep threads and descriptors for as long as the process lives"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

Seen = dict[str, dict[str, Any]]


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


def all_seen(queue: Any) -> Seen:
    return {name: inputs.seen(queue, case, f"p{number}") for number, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def theirs() -> Seen:
    with simple_storage() as queue:
        return all_seen(queue)


@pytest.fixture(scope="module")
def backend(theirs: Seen) -> Seen:
    with storage_job.job(memory="256MiB", spill=0, prewarm=0) as queue:
        return all_seen(queue)


@pytest.fixture(scope="module")
def calls(backend: Seen) -> Seen:
    with module() as queue:
        return all_seen(queue)


def expected(case: Case, name: str, rows: list[Any]) -> Any:
    """What this package gives back of rows that are these."""
    from dataplane.batch.tensordicts import stacked

    return look(stacked([rows[row] for row in inputs.reads(case)[name]]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("door", ["backend", "calls"])
def test_what_comes_back_is_what_transferqueue_gives(
    request: pytest.FixtureRequest, theirs: Seen, door: str, name: str
) -> None:
    case, real, ours = CASES[name], theirs[name], request.getfixturevalue(door)[name]
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


def of_tensors(case: Case) -> bool:
    return case.name in {each.name for each in inputs._updates()} and not case.keeps


@pytest.fixture(scope="module")
def dense(calls: Seen) -> Seen:
    with module(dense=True) as queue:
        return {case.name: inputs.seen(queue, case, case.name) for case in CASES.values() if of_tensors(case)}


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if of_tensors(case)])
def test_only_rows_that_were_put_dense_come_back_dense(theirs: Seen, dense: Seen, name: str) -> None:
    """... where they are of one shape, and whatever other rows of the field are."""
    case = CASES[name]
    latest: dict[int, Any] = {}
    for rows, entry in case.puts:
        for row in rows or ():
            latest[row] = entry()
    for how, rows in inputs.reads(case).items():
        real, ours = theirs[name][how], dense[name][how]
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
