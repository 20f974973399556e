"""Rows that several own, against a model: each owner has a set of cells, and a cell is there while one has it."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.locations import shard_of
from dataplane.batch.rows import RowIndices
from dataplane.config import NodeConfig
from dataplane.errors import Freed, LimitExceeded
from dataplane.store import live_cells, row_owners
from dataplane.store.links import Links
from dataplane.store.live_cells import LiveCells
from dataplane.store.store import Store

COLUMNS, ROWS = 2, 12
MIB = 1 << 20

Cell = tuple[int, int]


def put(store: Store, rows: int = ROWS, width: int = 64, scope: str = "") -> int:
    field, size = Field("dense", "uint8", (width,)), rows * width
    columns = tuple((name, ColumnLayout(field, rows, rows, ((i * size, size),))) for i, name in enumerate("ab"))
    number = store.put_now("a", bytes(COLUMNS * size), ShardLayout(columns).encode(), scope=scope, holder="a")
    assert number is not None
    return number


def store_in(directory: Path | str) -> Store:
    return Store(NodeConfig(memory=MIB, spill=0, spill_dir=Path(directory), prewarm=0))


SELECTED = st.lists(
    st.tuples(
        st.lists(st.integers(0, COLUMNS - 1), min_size=1, max_size=2),
        st.one_of(
            st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(
                lambda pair: RowIndices.range(pair[0], min(ROWS, pair[0] + pair[1]))
            ),
            st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5).map(RowIndices.index),
        ),
    ),
    min_size=1,
    max_size=2,
)


def cells_of(selected: list[tuple[list[int], RowIndices]]) -> set[Cell]:
    return {(column, row) for columns, rows in selected for column in columns for row in rows.array().tolist()}


class OwnersAgainstAModel(RuleBasedStateMachine):
    """Shards are put, retained through any owner, freed whole and in part, more than once, and by scope."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.store = store_in(self.directory.name)
        self.owners: dict[int, set[Cell]] = {}  # by number of a shard or link, those that have nothing left too
        self.scopes: dict[str, list[int]] = {}
        self.retained: list[int] = []
        self.store.owners.retained = lambda number, selected: self.retained.append(number)

    def teardown(self) -> None:
        asyncio.run(self.store.aclose())
        self.directory.cleanup()

    def physical(self, shard: int) -> set[Cell]:
        return set().union(*(cells for number, cells in self.owners.items() if shard_of(number) == shard))

    def any_owner(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.owners)))

    @rule(scope=st.sampled_from(["", "s"]))
    def put(self, scope: str) -> None:
        number = put(self.store, scope=scope)
        self.owners[number] = {(column, row) for column in range(COLUMNS) for row in range(ROWS)}
        if scope:
            self.scopes.setdefault(scope, []).append(number)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), selected=SELECTED)
    def retain(self, data: st.DataObject, selected: list[tuple[list[int], RowIndices]]) -> None:
        shard = shard_of(self.any_owner(data))
        wanted = cells_of(selected)
        if wanted <= self.physical(shard):
            (made,) = self.store.owners.retain([(shard, selected)], holder="b")
            assert made not in self.owners
            self.owners[made] = wanted
            assert self.retained[-1] == made
            assert self.store.owners.put_by(made) == ("b", "")
        else:
            with pytest.raises(Freed):
                self.store.owners.retain([(shard, selected)], holder="b")

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), selected=SELECTED, punch=st.booleans())
    def free_part(self, data: st.DataObject, selected: list[tuple[list[int], RowIndices]], punch: bool) -> None:
        number = self.any_owner(data)
        for columns, rows in selected:
            self.store.free_part(number, columns, rows, punch=punch)
        self.owners[number] -= cells_of(selected)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = self.any_owner(data)
        self.store.free([number])
        self.owners[number] = set()

    @rule()
    def free_scope(self) -> None:
        self.store.free(self.store.shards.under("s"))
        for number in self.scopes.pop("s", []):
            self.owners[number] = set()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), selected=SELECTED)
    def require(self, data: st.DataObject, selected: list[tuple[list[int], RowIndices]]) -> None:
        number = self.any_owner(data)
        there = cells_of(selected) <= self.owners[number]
        try:
            for columns, rows in selected:
                self.store.owners.require(number, columns, rows)
        except Freed:
            assert not there
        else:
            assert there

    @invariant()
    def a_cell_is_there_while_somebody_has_it(self) -> None:
        for shard in {shard_of(number) for number in self.owners}:
            left = self.physical(shard)
            with suppress(Freed):
                described = self.store.shards.describe([shard])[0]
                cells = LiveCells.of(described[4], COLUMNS, ROWS)
                flags = [cells.flags(column, 0, ROWS) for column in range(COLUMNS)]
                assert {(column, row) for column, row in np.argwhere(flags).tolist()} == left
                continue
            assert not left

    @invariant()
    def nothing_is_known_of_owners_of_what_is_gone(self) -> None:
        alive = {shard_of(number) for number, cells in self.owners.items() if cells}
        assert self.store.statistics().shards == len(alive)
        if not alive:
            assert self.store.owners.nbytes == 0
            assert self.store.statistics().budget.used == 0


TestOwnersAgainstAModel = OwnersAgainstAModel.TestCase
TestOwnersAgainstAModel.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_memory_for_row_owners_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    monkeypatch.setattr(row_owners, "_LINKS", 4096)
    number = put(store)
    made = []
    with pytest.raises(LimitExceeded, match="put rows anew"):
        for _ in range(100):
            made += store.owners.retain([(number, [([0], RowIndices.range(0, 1))])], holder="b")
    assert 1 < len(made) < 9
    store.free(made)
    made = store.owners.retain([(number, [([0], RowIndices.range(0, 1))])], holder="b")
    store.free([number, *made])
    assert store.owners.nbytes == 0
    asyncio.run(store.aclose())


def test_a_shard_that_is_not_retained_any_more_has_no_record_of_owners(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    number = put(store)
    some = [([0], RowIndices.range(0, 1))]
    first, second = store.owners.retain([(number, some), (number, some)], holder="b")
    store.free_part(first, *some[0])
    assert store.owners.nbytes > 0  # of `second`
    store.free([second])
    assert store.owners.nbytes == 0
    third = store.owners.retain([(number, some)], holder="b")[0]
    assert third not in (first, second)  # so a repeated free does not free the cells of a later link
    store.free([first, second, third, number])
    assert store.statistics().shards == 0
    asyncio.run(store.aclose())


def test_the_owner_records_of_a_new_link_take_one_block_of_bits_for_all_whole_columns() -> None:
    """They are made at the first link after each time without links."""
    links = Links(512, 8, None, "a", 1)
    assert len({id(bits) for bits in links._links[0].bits.values()}) == 1
    links.retain([([0], RowIndices.range(0, 4))], "b")
    links.free(0, [([1], RowIndices.range(2, 8))])
    assert links.have(0, [0, *range(2, 512)], RowIndices.range(0, 8))
    assert not links.have(0, [1], RowIndices.range(2, 3))


# Which cells exist after any frees, whatever the blocks.

CELL_ROWS = 50


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_cells, "BLOCK", 8)


def some_rows() -> st.SearchStrategy[RowIndices]:
    ends = st.tuples(st.integers(0, CELL_ROWS), st.integers(0, CELL_ROWS)).map(sorted)
    picked = st.lists(st.integers(0, CELL_ROWS - 1), max_size=20)
    return st.one_of(ends.map(lambda pair: RowIndices.range(*pair)), picked.map(RowIndices.index))


@pytest.mark.usefixtures("_small_blocks")
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), some_rows()), max_size=12),
    some_rows(),
    st.tuples(st.integers(0, CELL_ROWS), st.integers(0, CELL_ROWS)).map(sorted),
)
def test_live_cells_are_exactly_those_not_freed(
    freed: list[tuple[list[int], RowIndices]], asked: RowIndices, window: tuple[int, int]
) -> None:
    cells, left = LiveCells(2, CELL_ROWS), np.ones((2, CELL_ROWS), np.bool_)
    for columns, rows in freed:
        cells.free(columns, rows)
        for column in columns:
            left[column, rows.array()] = False
    again = LiveCells.of(cells.blocks, 2, CELL_ROWS)
    first, stop = window
    for each in (cells, again):
        assert bool(each) == left.any()
        assert each.blocks == cells.blocks
        for column in range(2):
            assert each.all(column, asked) == left[column, asked.array()].all()
            assert np.array_equal(each.flags(column, first, stop), left[column, first:stop])
            inside = np.unique(asked.array())
            assert np.array_equal(each.freed([column], asked), inside[~left[column, inside]])
