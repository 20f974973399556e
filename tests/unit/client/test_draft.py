"""Drafts: written in place, sealed in place, by dtype and kind; what they refuse; what becomes of their memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import dataplane as dp
from dataplane.aio import AsyncPlane
from dataplane.client.draft import Spec, dense, ragged
from dataplane.client.memory import NodeSegment
from tests.cases import each_case
from tests.processes import MIB, StandingNode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingNode]:
    with StandingNode(tmp_path_factory.mktemp("node"), spill=0) as node:
        yield node


@pytest.fixture
async def plane(node: StandingNode) -> AsyncIterator[AsyncPlane]:
    async with dp.aio.connect(node.address) as plane:
        yield plane
        async with asyncio.timeout(60):
            while (await plane.stats()).memory_used:
                gc.collect()
                await asyncio.sleep(0.001)


dtypes = st.sampled_from(["bool", "uint8", "int16", "float16", "int64", "float64", "complex64"])
shapes = st.lists(st.integers(1, 4), max_size=2).map(tuple)
_counter = itertools.count()


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Spec]:
    rows = draw(st.integers(1, 6))
    lengths = st.lists(st.integers(0, 5), min_size=rows, max_size=rows)
    kinds = st.one_of(
        st.builds(lambda shape, dtype: dense((rows, *shape), dtype), shapes, dtypes),
        st.builds(ragged, lengths, shapes, dtypes),
    )
    return {f"c{i}": spec for i, spec in enumerate([dense((rows,), "uint8"), *draw(st.lists(kinds, max_size=4))])}


def value(spec: Spec, shape: tuple[int, ...], dtype: Any) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count) + next(_counter)).astype(dtype).reshape(shape)


async def test_drafts_of_any_columns_round_trip(plane: AsyncPlane) -> None:
    loop = asyncio.get_running_loop()

    async def one(columns: dict[str, Spec]) -> None:
        draft = await plane.draft(columns)
        assert list(draft) == list(columns)
        written: dict[str, Any] = {}
        for name, spec in columns.items():
            arrays = draft[name]
            if isinstance(arrays, list):
                written[name] = [value(spec, array.shape, array.dtype) for array in arrays]
                for array, values in zip(arrays, written[name], strict=True):
                    array[...] = values
            else:
                written[name] = value(spec, arrays.shape, arrays.dtype)
                arrays[...] = written[name]
        ref = await draft.seal()
        batch = await plane.get(ref)
        for name, spec in columns.items():
            got = batch[name].numpy()
            assert batch[name].kind == spec.field.kind
            for ours, theirs in zip(written[name], got, strict=True):
                assert np.asarray(theirs).dtype == np.asarray(ours).dtype
                assert np.array_equal(ours, theirs)
        await plane.free(ref)

    @given(specs())
    def all_of_them(columns: dict[str, Spec]) -> None:
        asyncio.run_coroutine_threadsafe(one(columns), loop).result(60)

    await asyncio.to_thread(all_of_them)


async def test_a_dropped_draft_returns_its_reservation_and_is_closed(plane: AsyncPlane) -> None:
    draft = await plane.draft({"x": dense((1, MIB), "uint8")})
    array = draft["x"]
    draft.drop()
    draft.drop()
    assert (await plane.stats()).reserved_bytes == 0
    with pytest.raises(dp.Closed):
        await draft.seal()
    with pytest.raises(dp.Closed):
        draft["x"]
    ref = await plane.put({"x": np.full((1, MIB), 1, np.uint8)})
    array[:] = 2  # not ours any more; harmless all the same
    assert (await plane.get(ref))["x"].numpy().max() == 1
    await plane.free(ref)


@pytest.mark.filterwarnings("ignore:a draft was neither sealed:ResourceWarning")
async def test_the_last_array_of_a_forgotten_draft_returns_its_reservation(plane: AsyncPlane) -> None:
    array = (await plane.draft({"x": dense((1, MIB), "uint8")}))["x"]
    array[:] = 1
    assert (await plane.stats()).reserved_bytes
    del array
    await asyncio.sleep(0)
    assert (await plane.stats()).reserved_bytes == 0
    assert not plane.connection.heartbeat.beats


async def test_a_draft_stays_open_while_its_memory_cannot_be_made_private(
    plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays would write into memory that is given to others."""

    def refuse(*_: object) -> None:
        raise dp.LimitExceeded("no mapping")

    draft = await plane.draft({"x": dense((1, MIB), "uint8")})
    with monkeypatch.context() as patched:
        patched.setattr(NodeSegment, "unshare", refuse)
        with pytest.raises(dp.LimitExceeded):
            await draft.seal()
        with pytest.raises(dp.LimitExceeded):
            draft.drop()
    assert (await plane.stats()).reserved_bytes
    draft.drop()
    assert (await plane.stats()).reserved_bytes == 0


@each_case("rows", [2**60, 2**62, 2**70])
async def test_a_draft_larger_than_memory_is_refused(plane: AsyncPlane, rows: int) -> None:
    with pytest.raises(dp.LimitExceeded) as caught:
        await plane.draft({"x": dense((rows, 8), "int64")})
    assert caught.value.what == "memory"
    with pytest.raises(dp.SchemaMismatch, match="mapping"):
        await plane.draft(5)  # type: ignore[arg-type]
