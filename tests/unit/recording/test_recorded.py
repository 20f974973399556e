"""Rows that were recorded, and read again: every kind of column, to the last bit, out of parts and out of Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.batch.batch import Batch
from dataplane.batch.gather import stored_field
from dataplane.batch.put_plan import plan
from dataplane.errors import Corrupt
from dataplane.recording import Manifest, Reader, Recorded, RowNames, Writer
from dataplane.recording import reader as reader_module
from tests.cases import each_case
from tests.unit.batch.exact import local_batch, materialise, same

DTYPES = ["?", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8", ">c8"]
TIMES = ["M8[ns]", "M8[s]", "M8[D]", "M8[us]", "m8[s]", "m8[D]", ">M8[s]", ">m8[ms]"]
ROWS = 4


def names(rows: int, first: int = 0) -> RowNames:
    keys = [f"~ab.{row}" for row in range(first, first + rows)]
    return RowNames(keys, [None] * rows, [7] * rows, {}, keys)


def manifest(columns: Any) -> Manifest:
    return Manifest("rollouts", ["actor"], list(columns))


def again(path: Path, batch: Batch, *, packed: bool) -> tuple[RowNames, Batch]:
    """The batch after it was recorded to an empty directory, and read out of parts, or of Parquet."""
    writer = Writer(path, manifest(batch))
    writer.write(batch, names(len(batch)))
    if packed:
        writer.close()
    else:
        writer.abort()
    (recorded,) = Reader(path).rows()
    return recorded.names, read(recorded)


def read(recorded: Recorded) -> Batch:
    return materialise(plan(recorded.columns))


def check(path: Path, batch: Batch) -> None:
    for packed in (False, True):
        _, found = again(path / str(packed), batch, packed=packed)
        assert list(found) == list(batch)
        for name, column in batch.items():
            assert found[name].field.kind == column.field.kind
            assert found[name].dtype == column.dtype
            assert found[name].shape == column.shape
            assert stored_field(found[name].reading, found[name].field) == stored_field(column.reading, column.field)
            if column.kind in ("dense", "ragged", "struct"):  # to the last bit, of NaN too
                assert same(found[name].numpy(), column.numpy()), name
            else:
                assert same(found[name].to_list(), column.to_list()), name


KINDS: dict[str, Any] = {
    "numbers": np.arange(12, dtype=np.float32).reshape(ROWS, 3),
    "flags": np.array([True, False, True, True]),
    "nothing": np.empty((ROWS, 0), np.int16),
    "images": [np.ones((2, n, 3), np.float32) for n in (1, 2, 0, 3)],
    "items": [np.ones((n, 2), np.int16) for n in (2, 0, 3, 1)],
    "bfloat16": torch.randn(ROWS, 5).bfloat16(),
    "float8": torch.randn(ROWS, 5).to(torch.float8_e4m3fn),
    "ragged bfloat16": [torch.randn(n).bfloat16() for n in (2, 0, 3, 1)],
    "nan bits": np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000], np.uint32).view(np.float32),
    "ragged nan bits": [np.array([0x7FF8000000000001, 1], np.uint64).view(np.float64)] * ROWS,
    "text": ["a", "bc", "", "ü\0"],
    "bytes": [b"\xff", b"", b"abc", b"\0"],
    "large bytes": [bytes([n]) * 9000 for n in (1, 2, 1, 1)],
    "repeated": [np.ones((3, 600), np.float32), np.zeros((2, 600), np.float32), *[np.ones((3, 600), np.float32)] * 2],
    "repeated dense": np.ones((ROWS, 40, 40)),
    "repeated bfloat16": [torch.ones(4096).bfloat16()] * ROWS,
    "objects": [None, 1, (2,), {3: {4}}],
    "large objects": [{"a": np.arange(5000), "b": (b"x" * 5000, 1)}, None, b"y" * 5000, {"a": np.arange(5000)}],
    "empty lists": [[]] * ROWS,
    "empty lists in structs": [{"a": []}, {"a": [], "b": 1}, {}, {"a": []}],
    "structs without keys": [{}] * ROWS,
    "structs without keys in structs": [{"a": {}, "b": {"c": {}}}, {"b": {}}, {}, {"a": {}}],
    "structs": [{"a": 1}, {"b": "x"}, {}, {"a": 2, "b": "y"}],
    "nested": [{"s": {"t": ["x"]}, "r": np.arange(3)}, {"s": {"u": b"b"}}, {}, {"r": np.arange(1)}],
    "times in structs": [{"t": np.datetime64("NaT", "s"), "d": np.timedelta64("NaT", "ms")}, {}, {}, {}],
    "pixels in structs": [{"p": np.ones((2, 3, 999)), "g": np.ones((1, 3), np.int64)}] * 2 + [{}] * 2,
    **{f"times {dtype}": np.array([0, "NaT", -5, 3], dtype) for dtype in TIMES},
    **{f"ragged times {dtype}": [np.array([0, "NaT"], dtype), np.array([], dtype)] * 2 for dtype in TIMES},
    **{f"dense {dtype}": np.ones((ROWS, 2, 3), dtype) for dtype in DTYPES},
    **{f"ragged {dtype}": [np.ones((n, 2), dtype) for n in (1, 0, 3, 2)] for dtype in DTYPES},
}


def test_every_kind_of_column_round_trips_through_a_recording(tmp_path: Path) -> None:
    check(tmp_path, local_batch(KINDS))


@each_case("seeded", [True, False])  # not: as recordings were begun that had other hashes
def test_an_altered_media_file_is_corrupt(tmp_path: Path, seeded: bool) -> None:
    data = np.random.default_rng(0).bytes(1 << 18)
    if not seeded:
        manifest(["x"]).write(tmp_path)
    with Writer(tmp_path, manifest(["x"])) as writer:
        writer.write(local_batch({"x": [data] * 4}), names(4))
    (recorded,) = Reader(tmp_path).rows()
    assert read(recorded)["x"].to_list() == [data] * 4
    (media,) = (tmp_path / "media").iterdir()
    with media.open("r+b") as file:
        file.seek(media.stat().st_size // 2)
        file.write(b"\0\0\0\0")
    assert bool(Reader(tmp_path).manifest.seed) == seeded
    with pytest.raises(Corrupt, match="has not the medium" if seeded else "damaged"):
        list(Reader(tmp_path).rows())
    media.write_bytes(b"no Parquet")
    with pytest.raises(Corrupt, match="damaged"):
        Writer(tmp_path, manifest(["x"]))


def test_a_schema_that_widens_begins_another_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path, manifest(["x"]))
    writer.write(local_batch({"x": [np.ones((1, 2))]}), names(1))
    writer.write(local_batch({"x": [np.ones((1, 3)), np.ones((2, 2))]}), names(2, 1))
    writer.close()
    assert [each.count for each in writer.manifest.files] == [1, 2]
    assert [row.shape for each in Reader(tmp_path).rows() for row in read(each)["x"].numpy()] == [
        (1, 2),
        (1, 3),
        (2, 2),
    ]


def test_parts_that_are_written_while_a_reader_looks_for_the_next_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, look, left = Writer(tmp_path, manifest(["x"])), Manifest.read, [1, 2]
    writer.write(local_batch({"x": np.zeros(1)}), names(1))
    reader = Reader(tmp_path)

    def looks(directory: Path) -> Manifest:
        found = look(directory)
        while left:
            writer.write(local_batch({"x": np.zeros(1)}), names(1, left.pop(0)))
        return found

    monkeypatch.setattr(Manifest, "read", looks)
    assert [row for each in reader.rows() for row in each.names.rows] == ["~ab.0", "~ab.1", "~ab.2"]
    writer.abort()


def test_a_medium_is_found_though_its_part_becomes_a_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = [np.random.default_rng(seed).bytes(9000) for seed in range(2)]
    writer, look = Writer(tmp_path, manifest(["x"])), Manifest.read
    for row, data in enumerate((*media, media[0])):
        writer.write(local_batch({"x": [data]}), names(1, row))
    reader = Reader(tmp_path)
    monkeypatch.setattr(reader_module, "_KEPT_BYTES", 9000)

    def looks(directory: Path) -> Manifest:
        found = look(directory)
        writer.rotate()
        return found

    monkeypatch.setattr(Manifest, "read", looks)
    assert [read(each)["x"].to_list() for each in reader.rows(rows=1)] == [[media[0]], [media[1]], [media[0]]]
    writer.abort()
