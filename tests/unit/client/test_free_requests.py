"""What is freed is told in messages, and none is too large for one."""

from __future__ import annotations

import msgspec
import numpy as np

from dataplane.batch.rows import RowIndices
from dataplane.client.ownership import part_nbytes, parts_of, portions
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm


def test_a_free_of_millions_of_rows_is_split_into_valid_messages() -> None:
    rows = RowIndices.index(np.arange(0, 6_000_000, 2))
    told = list(portions([*parts_of(1, (0,), rows), *parts_of(2, (0, 1), RowIndices.range(0, 9))], part_nbytes))
    assert all(len(msgspec.msgpack.encode(sm.Free(1, [], portion, ""))) < m.MAX_FRAME for portion in told)
    parts = [part for portion in told for part in portion]
    found = np.concatenate([RowIndices.decode(encoded).array() for shard, _, encoded in parts if shard == 1])
    assert np.array_equal(found, rows.array())
    assert parts[-1] == (2, [0, 1], (0, 9, b""))
