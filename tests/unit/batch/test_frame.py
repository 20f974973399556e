"""A reference that a stream delivered knows its rows there, whatever is done to it."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse

NODE, STREAM, OTHER = b"n" * 8, b"s" * 8, b"t" * 8


def a_ref(name: str = "a", shard: int = 1, rows: int = 10) -> BatchRef:
    return ref_to(NODE, rows, [(name, Field("dense", "int64", ()), 8 * rows, shard, 0)])


def rows_of(ref: BatchRef) -> list[int]:
    found = ref.origin()
    assert found is not None
    assert found[0] == STREAM
    return found[1].tolist()


def test_rows_keep_theirs() -> None:
    ref = a_ref().with_origin(STREAM, np.arange(100, 110))
    assert rows_of(ref) == list(range(100, 110))
    assert rows_of(ref[3:5]) == [103, 104]
    assert rows_of(ref[[7, 2, 2]]) == [107, 102, 102]
    assert rows_of(ref[[7, 2]].repeat(2)) == [107, 107, 102, 102]
    assert rows_of(ref.chunk(2)[1]) == list(range(105, 110))
    assert ref[0:0].origin() is None


def test_what_is_concatenated_has_one_where_all_have() -> None:
    ref = a_ref().with_origin(STREAM, np.arange(10))
    more = a_ref("a", 2).with_origin(STREAM, np.arange(50, 60))
    assert rows_of(concat([more, ref[:2]])) == [*range(50, 60), 0, 1]
    assert concat([ref, a_ref("a", 3)]).origin() is None
    with pytest.raises(Misuse, match="several streams"):
        concat([ref, a_ref("a", 3).with_origin(OTHER, np.arange(10))]).origin()
