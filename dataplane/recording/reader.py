"""Reads a recording, also while a writer extends it and after its writer was killed.

Invariants: rows are returned in the order in which they were recorded, each once. Memory holds one batch of a Parquet
file or one part, one row group of media, a bounded cache of media, and the hash of each medium. A torn part is logged
and left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataplane.batch.values import Values
from dataplane.errors import Corrupt, Misuse
from dataplane.recording import names, part
from dataplane.recording.encoding import decoded, hash_of
from dataplane.recording.manifest import File, Manifest, part_path
from dataplane.recording.names import RowNames

log = logging.getLogger(__name__)

ROWS = 256
"""The default number of rows at a time."""

_KEPT_BYTES = 256 << 20  # the most bytes of cached media


@dataclass(frozen=True, slots=True)
class Recorded:
    """Some rows of a recording: metadata and columns."""

    names: RowNames
    columns: dict[str, Values]

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: range) -> Recorded:
        index = np.array(rows)
        return Recorded(self.names.take(rows), {name: values.take(index) for name, values in self.columns.items()})


class Reader:
    """Reads the recording in one directory. One thread at a time may use a reader."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises Misuse if there is no recording, Corrupt, ProtocolMismatch."""
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self._places: dict[str, tuple[str, int]] = {}  # by the hash of a medium: its file, and its row there
        self._indexed: set[str] = set()
        self._contents: dict[str, bytes] = {}
        self._kept = 0

    @property
    def repeating(self) -> list[str]:
        """The columns whose values are media, so their rows may repeat. Excludes columns that only contain media."""
        return [name for name in self.manifest.columns if self.manifest.media.get(name)]

    def tables(
        self, *, rows: int = ROWS, wanted: Callable[[int, int], bool] = lambda lowest, highest: True
    ) -> Iterator[Any]:
        """The recording as `pyarrow.Table` of at most `rows` rows, with the columns of the metadata. `wanted`: whether
        to read a file of this lowest and highest version. Parts are always read. Raises Corrupt, Misuse."""
        if rows < 1:
            raise Misuse(f"a reader gives a row or more at a time, not {rows}")
        number, given = 0, dict[int, int]()
        while True:
            file = next((each for each in self.manifest.files if each.parts[0] <= number <= each.parts[1]), None)
            if file is not None:
                if wanted(*file.versions):
                    before = sum(given.get(part, 0) for part in range(file.parts[0], number))
                    yield from self._file(file, rows, before)
                number = file.parts[1] + 1
                continue
            try:
                found, media = part.read(part_path(self.directory, number))
            except Corrupt as error:
                log.warning("skipping a part of the recording: %s", error)
            except FileNotFoundError:
                known = self.manifest.parts
                self.manifest = Manifest.read(self.directory)  # the part may be in a file now
                if self.manifest.parts == known:
                    later = self._later(number)
                    if later is None:
                        return
                    number = later
                continue
            else:
                for key, data in zip(media["media"].to_pylist(), media["data"], strict=True):
                    self._keep(key, data.as_py())
                given[number] = found.num_rows
                yield from (found.slice(at, rows) for at in range(0, found.num_rows, rows))
            number += 1

    def _later(self, number: int) -> int | None:
        """The next number from this one on whose part exists now or begins a file; None if there is none."""
        there = [int(path.name[5:]) for path in part_path(self.directory, 0).parent.glob("part-????????")]
        starts = [each.parts[0] for each in self.manifest.files]
        return min((each for each in (*there, *starts) if each >= number), default=None)

    def _file(self, file: File, rows: int, given: int) -> Iterator[Any]:
        """The tables of a file without its first `given` rows, already returned from parts. Raises Corrupt."""
        path = self.directory / file.rows
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                for batch in parquet.iter_batches(batch_size=rows):
                    if given < batch.num_rows:
                        yield pa.Table.from_batches([batch.slice(given)])
                    given = max(0, given - batch.num_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Corrupt(f"{path} is damaged: {error}", path=str(path)) from error

    def rows(
        self, *, rows: int = ROWS, versions: Callable[[int], bool] | None = None, columns: list[str] | None = None
    ) -> Iterator[Recorded]:
        """The recording, at most `rows` rows at a time, of the wanted versions, with these columns or all. Raises
        Corrupt, and Misuse if there is no such column."""
        missing = [name for name in columns or () if name not in self.manifest.columns]
        if missing:
            there = ", ".join(self.manifest.columns)
            raise Misuse(f"the recording has no column {missing[0]!r}; it has {there}")
        for table in self.tables(rows=rows):
            said, own = names.split(table)
            if versions is not None:
                picked = [i for i, version in enumerate(said.versions) if versions(version)]
                if not picked:
                    continue
                if len(picked) < len(said):
                    said, own = said.take(picked), own.take(pa.array(picked))
            yield Recorded(said, decoded(own if columns is None else own.select(columns), self.medium))

    # media

    def medium(self, key: str) -> bytes:
        """The bytes of the medium with this hash. Raises KeyError if there is none, and Corrupt."""
        found = self._contents.get(key)
        if found is None:
            if key not in self._places:
                self._index()
            try:
                found = self._fetch(key)
            except KeyError:
                self._index()  # its part was made into a file meanwhile
                found = self._fetch(key)
        return found

    def _keep(self, key: str, data: bytes) -> None:
        if key not in self._contents:
            self._contents[key] = data
            self._kept += len(data)
        while self._kept > _KEPT_BYTES and len(self._contents) > 1:
            oldest = next(iter(self._contents))
            self._kept -= len(self._contents.pop(oldest))

    def _index(self) -> None:
        """Read the manifest again, and index the media of its new files. Raises Corrupt."""
        self.manifest = Manifest.read(self.directory)
        for each in self.manifest.files:
            if each.media and each.media not in self._indexed:
                with _damaged(self.directory / each.media):
                    found = pq.read_table(self.directory / each.media, columns=["media"])["media"].to_pylist()
                self._places.update({key: (each.media, row) for row, key in enumerate(found)})
                self._indexed.add(each.media)

    def _fetch(self, key: str) -> bytes:
        name, row = self._places[key] if key in self._places else self._in_parts(key)
        if not name:
            return self._contents[key]
        path = self.directory / name
        with _damaged(path), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if row < count:
                    table = parquet.read_row_group(group)
                    if str(table["media"][row]) != key:
                        break
                    for own, data in zip(table["media"].to_pylist(), table["data"], strict=True):
                        self._keep(own, data.as_py())
                    found = bytes(table["data"][row].as_py())
                    if self.manifest.seed and hash_of(found, self.manifest.seed) != key:
                        break
                    return found
                row -= count
        raise Corrupt(f"{path} has not the medium {key}", path=str(path))

    def _in_parts(self, key: str) -> tuple[str, int]:
        """Cache a medium from a part, and return ("", 0). Raises KeyError if no part has the medium."""
        for path in sorted(part_path(self.directory, 0).parent.glob("part-????????")):
            try:
                media = part.read(path)[1]
            except (Corrupt, FileNotFoundError):
                continue
            at = pc.index(media["media"], key).as_py()
            if at >= 0:
                self._keep(key, media["data"][at].as_py())
                return "", 0
        raise KeyError(key)


class _damaged:
    """Raises Corrupt for errors of pyarrow and of the system about a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, pa.ArrowException | OSError):
            raise Corrupt(f"{self._path} is damaged: {error}", path=str(self._path)) from error
