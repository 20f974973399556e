"""Columns whose rows are of several kinds."""

from __future__ import annotations

import numpy as np

from dataplane.batch import variants
from dataplane.batch.columns import values_of
from dataplane.batch.local import local_batch
from tests.cases import each_case


def mixed(texts: list[int], numbers: list[int], rows: int) -> object:
    flags = []
    for own in (texts, numbers):
        present = np.zeros(rows, np.bool_)
        present[own] = True
        flags.append(present)
    return variants.join(
        [
            ("text", flags[0], values_of("x", [f"t{i}" for i in texts])),
            ("number", flags[1], values_of("x", np.array(numbers, np.float32))),
        ],
        rows,
    )


def test_rows_of_two_kinds_are_told_apart() -> None:
    batch = local_batch({"x": mixed([0, 3], [1, 2], 4)})
    found = {each.name: each for each in variants.split(batch["x"])}
    assert found["text"].present.tolist() == [True, False, False, True]
    assert found["text"].column.to_list() == ["t0", "t3"]
    assert found["number"].column.numpy().tolist() == [1.0, 2.0]


@each_case(("rows", "kinds"), [(slice(1, 3), ["number"]), (slice(0, 1), ["text"]), (slice(0, 0), [])])
def test_a_kind_of_no_row_is_left_out(rows: slice, kinds: list[str]) -> None:
    column = local_batch({"x": mixed([0, 3], [1, 2], 4)})["x"][rows]
    assert [each.name for each in variants.split(column)] == kinds


def test_a_kind_of_all_rows_is_read_in_place() -> None:
    values = np.arange(12, dtype=np.int64).reshape(4, 3)
    batch = local_batch({"x": variants.join([("number", None, values_of("x", values))], 4)})
    one, other = variants.split(batch["x"])[0].column, variants.split(batch["x"][1:3])[0].column
    assert np.shares_memory(one.numpy(), other.numpy())
    assert other.numpy().tolist() == [[3, 4, 5], [6, 7, 8]]
