"""Which references mean rows that others mean too."""

from __future__ import annotations

from typing import Any

import dataplane as dp
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.collective.overlaps import overlapping
from tests.cases import each_case

NODE = bytes(8)
REF = BatchRef.of(NODE, 40, [("x", Field("dense", "int64"), 320, 1, 0), ("y", Field("text"), 400, 1, 1)])
OTHER = BatchRef.of(NODE, 40, [("x", Field("dense", "int64"), 320, 2, 0), ("y", Field("text"), 400, 2, 1)])


@each_case(
    ("refs", "groups"),
    [
        ([REF], [[0]]),
        ([REF, REF], [[0, 1]]),
        ([REF[:20], REF[20:]], [[0], [1]]),
        ([REF, OTHER], [[0], [1]]),
        ([REF[:20], OTHER[:5], REF[19:], OTHER[4:6]], [[0, 2], [1, 3]]),
        ([REF[:10], REF[20:30], REF[[9, 25]]], [[0, 1, 2]]),  # by the third
        ([REF[30:], REF[:10], REF[10:20], dp.concat([REF[:1], REF[35:]])], [[0, 1, 3], [2]]),
        ([REF.select("x"), REF.select("y")], [[0], [1]]),
        ([REF.select("x"), REF.select("y"), REF[3]], [[0, 1, 2]]),
        ([REF[:0], REF, REF[:0]], [[0], [1], [2]]),
        ([REF[[3, 3, 1]], REF[1].repeat(4)], [[0, 1]]),
        ([REF.rename({"x": "z"}), REF.select("x")], [[0, 1]]),
    ],
)
def test_references_with_rows_in_common_are_together(refs: list[Any], groups: list[list[int]]) -> None:
    assert overlapping(refs) == groups
