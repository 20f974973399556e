"""What a node keeps for tables whose home is another: it stays until that says that it is not needed, or is gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.ref import BatchRef
from dataplane.clock import monotonic
from dataplane.config import NodeConfig
from dataplane.errors import Freed, PeerUnavailable, ProtocolMismatch
from dataplane.node.streams.homes import Homes
from dataplane.node.tables.keeping import Keeping
from dataplane.store.store import Store
from dataplane.wire import peer_messages as pm

ME, HOME, ASKER = b"me......", b"home....", b"asker..."
INT = Field("dense", "int64", ())
ROWS = 4


class Kept:
    def __init__(self, directory: Path) -> None:
        self.store = Store(NodeConfig(memory="1MiB", spill=0, spill_dir=directory, prewarm=0))
        homes = Homes(ME, self.store, monotonic)
        self.keeping = Keeping(ME, homes, cast(Any, SimpleNamespace(knows=lambda node: node == HOME)))

    def put(self) -> BatchRef:
        columns = tuple((name, ColumnLayout(INT, ROWS, ROWS, ((64 * at, 32),))) for at, name in enumerate("xy"))
        layout = ShardLayout(columns).encode()
        shard = self.store.put_now("client", bytes(128), layout, scope="", holder="")
        assert shard is not None
        return BatchRef.of(ME, ROWS, [(name, INT, 32, shard, at) for at, name in enumerate("xy")])

    def thin(self, columns: str, rows: list[int], *, done: bool = False, number: int = 1) -> None:
        over = [(ASKER, number, list(columns), np.array(rows, np.int64).tobytes(), done)]
        self.keeping.thin(pm.ThinRows(0, HOME, over))


@pytest.fixture
async def kept(tmp_path: Path) -> Any:
    made = Kept(tmp_path)
    yield made
    await made.store.aclose()


async def test_cells_go_as_the_home_says(kept: Kept) -> None:
    ref = kept.put()
    for _ in range(2):  # asked again, as the answer was lost
        kept.keeping.keep(HOME, ASKER, 1, ref)
    kept.thin("x", [0, 1])
    [live] = [bits for *_, bits in kept.store.describe([ref.shards()[0][1]])]
    assert np.unpackbits(np.frombuffer(live, np.uint8)).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    kept.thin("x", [2, 3])
    kept.thin("y", [0, 1, 2, 3], done=True)
    assert (len(kept.store._shards), len(kept.keeping)) == (0, 0)
    kept.thin("y", [0], done=True)  # told again


async def test_what_did_not_come_into_the_table_is_whose_it_was(kept: Kept) -> None:
    ref = kept.put()
    kept.keeping.keep(HOME, ASKER, 1, ref)
    kept.keeping.let_go(HOME, ASKER, 1)
    kept.keeping.let_go(HOME, ASKER, 1)
    assert len(kept.store._shards) == 1
    assert len(kept.keeping) == 0


async def test_a_home_that_is_gone_needs_nothing(kept: Kept) -> None:
    first, second = kept.put(), kept.put()
    kept.keeping.keep(HOME, ASKER, 1, first)
    kept.keeping.keep(HOME, ASKER, 2, second)
    kept.thin("xy", [0])
    kept.keeping.gone(b"another.")
    assert len(kept.store._shards) == 2
    kept.keeping.gone(HOME)
    assert (len(kept.store._shards), len(kept.keeping)) == (0, 0)
    with pytest.raises(Freed):
        kept.keeping.keep(HOME, ASKER, 3, first)


async def test_nothing_is_kept_of_homes_that_nobody_knows(kept: Kept) -> None:
    """Forged messages with a name of their own each would fill the memory."""
    ref = kept.put()
    for number in range(100):
        stranger = number.to_bytes(8, "little")
        with pytest.raises(PeerUnavailable, match="no member"):
            kept.keeping.keep(stranger, ASKER, 1, ref)
        kept.keeping.let_go(stranger, ASKER, 1)
        kept.keeping.thin(pm.ThinRows(0, stranger, [(ASKER, 1, ["x"], b"", False)]))
        kept.keeping.gone(stranger)
    assert not kept.keeping._kept


@pytest.mark.parametrize(("columns", "rows"), [("z", [0]), ("", [0]), ("x", [4]), ("x", [-1]), ("x", [1 << 62])])
async def test_cells_that_no_write_has_brought_are_refused(kept: Kept, columns: str, rows: list[int]) -> None:
    ref = kept.put()
    kept.keeping.keep(HOME, ASKER, 1, ref)
    with pytest.raises(ProtocolMismatch):
        kept.thin(columns, rows)
    with pytest.raises(ProtocolMismatch):
        kept.keeping.thin(pm.ThinRows(0, HOME, [(ASKER, 1, ["x"], b"123", False)]))
    kept.store.require(ref.shards()[0][1], (0, 1), ref.footprint()[ref.shards()[0]][0][1])
