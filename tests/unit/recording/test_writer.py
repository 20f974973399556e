"""A writer that is broken off at every step of its work, and what the next one makes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.errors import LimitExceeded, Misuse, SchemaMismatch
from dataplane.recording import Manifest, Reader, RowNames, Writer
from dataplane.recording import writer as writer_module
from tests.cases import each_case
from tests.unit.batch.exact import local_batch

BATCHES, ROWS = 4, 3


class Killed(BaseException):
    """The process ends here."""


def names(batch: int) -> RowNames:
    keys = [f"{batch}.{row}" for row in range(ROWS)]
    return RowNames(keys, [None] * ROWS, [batch] * ROWS, {}, keys)


def manifest() -> Manifest:
    return Manifest("rollouts", ["actor"], ["x"])


def columns(batch: int) -> Any:
    return local_batch({"x": [np.full(5000, batch, np.uint8).tobytes()] * ROWS})


def work(path: Path) -> None:
    """Write what is not there yet, as a recorder does to whom all rows come again that were not acked."""
    writer = Writer(path, manifest(), max_file_bytes=1)
    try:
        for batch in range(BATCHES):
            said = names(batch)
            fresh = [row for row, there in enumerate(writer.seen(said.rows)) if not there]
            if fresh:
                writer.write(columns(batch), said)
            if batch % 2:
                writer.rotate()
        writer.close()
    finally:
        writer.abort()


def rows(path: Path) -> list[str]:
    return [key for each in Reader(path).rows() for key in each.names.keys]


EXPECTED = [key for batch in range(BATCHES) for key in names(batch).keys]


@each_case("call", ["replace", "fsync", "unlink", "open"])
def test_a_writer_that_is_killed_anywhere_leaves_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real: Callable[..., Any] = getattr(os, call)
    most = 1
    number = 0
    while number < most:
        left = [number]

        def broken(*args: Any, left: list[int] = left, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*args, **kwargs)

        path = tmp_path / str(number)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, broken)
            try:
                work(path)
                most = number  # it was called no more often
            except Killed:
                most += 1
        if (path / "manifest.json").exists():
            found = rows(path)
            assert found == EXPECTED[: len(found)], f"killed at {call} {number}"
        work(path)
        assert rows(path) == EXPECTED, f"killed at {call} {number}"
        assert sorted(each.name for each in (path / "_open").iterdir()) == ["lock"]
        number += 1
    assert number > 3


def test_a_disk_that_is_full_leaves_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, manifest(), max_file_bytes=5000)
    writer.write(columns(0), names(0))
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LimitExceeded, match="does not fit"):
        writer.write(columns(1), names(1))
    for pause, due in ((0.0, True), (600.0, False)):
        monkeypatch.setattr(writer_module, "_AGAIN_S", pause)
        with pytest.raises(LimitExceeded):
            writer.rotate()
        assert writer.due == due
    assert rows(tmp_path) == EXPECTED[:ROWS]
    monkeypatch.setattr(os, "fsync", real)
    writer.write(columns(1), names(1))
    assert writer.due, "the parts have grown by a file"
    writer.close()
    assert rows(tmp_path) == EXPECTED[: 2 * ROWS]


@each_case("error", [pa.ArrowNotImplementedError, pa.ArrowInvalid])
def test_a_type_that_parquet_lacks_leaves_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[str], Exception]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error("Cannot write x")

    with Writer(tmp_path, manifest()) as writer, monkeypatch.context() as patched:
        writer.write(columns(0), names(0))
        patched.setattr(pq, "ParquetWriter", refuse)
        with pytest.raises(SchemaMismatch, match="Cannot write x"):
            writer.rotate()
        assert rows(tmp_path) == EXPECTED[:ROWS]


@each_case(("call", "place"), [("unlink", "part-00000000"), ("fsync", "_open"), ("fsync", "recording")])
def test_parts_already_in_a_file_are_not_written_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, place: str
) -> None:
    path = tmp_path / "recording"
    writer = Writer(path, manifest())
    for batch in range(2):
        writer.write(columns(batch), names(batch))
    real: Callable[..., Any] = getattr(os, call)
    left = [place]

    def broken(what: Any, **kwargs: Any) -> None:
        real(what, **kwargs)
        if left and (os.readlink(f"/proc/self/fd/{what}") if call == "fsync" else str(what)).endswith(f"/{place}"):
            raise OSError(28, "No space left on device", left.pop())

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(LimitExceeded):
        writer.rotate()
    assert not left
    for batch in range(2, BATCHES):
        writer.write(columns(batch), names(batch))
    writer.close()
    assert rows(path) == EXPECTED
    Writer(path, manifest()).close()
    assert rows(path) == EXPECTED
    assert sorted(each.name for each in (path / "_open").iterdir()) == ["lock"]


def test_a_recording_has_at_most_one_writing_process(tmp_path: Path) -> None:
    Writer(tmp_path, manifest()).close(complete=True)
    with Writer(tmp_path, manifest()), pytest.raises(Misuse, match="another process"):
        assert not Reader(tmp_path).manifest.complete, "it is continued, perhaps not to the end"
        Writer(tmp_path, manifest())
