"""Writes a recording. `Writer.write` commits rows as a part. Parts that are large enough become a Parquet file.

The order on disk: the file of media, the file of rows, the manifest that names both, and then their parts are deleted.
A writer that dies in between leaves files that no manifest names. The next one deletes them, and reads the parts.

Invariants: a lock admits one writer of a recording at a time. A recorded row is `pending` until its ack is confirmed,
and `seen` finds such a row when it is delivered again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.batch.batch import Batch
from dataplane.errors import Corrupt, Misuse, SchemaMismatch
from dataplane.file_errors import file_errors
from dataplane.recording import names, part
from dataplane.recording.encoding import Encoder
from dataplane.recording.manifest import MEDIA, OPEN, ROWS, File, Manifest, make, part_path, sync
from dataplane.recording.names import RowNames

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 << 20
"""The default size of a file of rows together with its media, in bytes before compression."""

_AGAIN_S = 5.0  # seconds from a failed rotation until the next one is due
_GROUP_BYTES = 64 << 20  # the least bytes of a row group, except for the last
_DICTIONARY = [names.GROUP, names.TAGS]
_STATISTICS = [names.KEY, names.GROUP, names.NUMBER, names.VERSION]


class Writer:
    """A writer of one directory. A context manager, used by one thread at a time."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        manifest: Manifest,
        *,
        media: Sequence[str] = (),
        max_file_bytes: int = MAX_FILE_BYTES,
        compression: str = "zstd",
    ) -> None:
        """Begin a recording, or continue the existing one. Raises Misuse (another writer has the lock, its stream
        or columns differ, the directory cannot be written), LimitExceeded, Corrupt, ProtocolMismatch."""
        self.directory = Path(directory)
        self._most, self._compression = max_file_bytes, compression
        with file_errors(self.directory):
            for each in (ROWS, MEDIA, OPEN):
                (self.directory / each).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / OPEN / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._claim()
            self.manifest = self._found(manifest)
            self._encoder = Encoder(self.manifest.media, media, self.manifest.seed)
            self.pending = set(self.manifest.pending)
            self._media: set[str] = set()
            self._parts: list[int] = []
            self._bytes = 0
            self.failed = False
            """Whether the last rotation failed."""
            self._again_s, self._again_bytes = 0.0, 0
            self._schema: Any = None
            self.rows = sum(each.count for each in self.manifest.files)
            self._recover()
        except BaseException:
            os.close(self._lock)
            raise

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Misuse(f"another process records to {self.directory}: give each recorder its own directory") from None

    def _found(self, wanted: Manifest) -> Manifest:
        if not (self.directory / "manifest.json").exists():
            wanted.seed = secrets.randbits(63)
            wanted.write(self.directory)
            return wanted
        found = Manifest.read(self.directory)
        if (found.stream, sorted(found.columns)) != (wanted.stream, sorted(wanted.columns)):
            raise Misuse(
                f"{self.directory} is a recording of {', '.join(found.columns)} of stream {found.stream!r}, "
                f"not of {', '.join(wanted.columns)} of {wanted.stream!r}"
            )
        if found.complete:  # no longer, if this recorder is killed
            found.complete = False
            found.write(self.directory)
        return found

    def _recover(self) -> None:
        """Delete files that the manifest does not name, and read the parts."""
        known = {name for each in self.manifest.files for name in (each.rows, each.media)}
        with file_errors(self.directory):
            for kind in (ROWS, MEDIA):
                for path in (self.directory / kind).iterdir():
                    if f"{kind}/{path.name}" not in known:
                        path.unlink()
            for path in sorted((self.directory / OPEN).iterdir()):
                if path.suffix == ".tmp":
                    path.unlink()
                elif path.name.startswith("part-") and not path.suffix:
                    self._take_up(path)
        for each in self.manifest.files:
            if each.media:
                path = self.directory / each.media
                with file_errors(path):
                    try:
                        self._media.update(pq.read_table(path, columns=["media"])[0].to_pylist())
                    except pa.ArrowException as error:
                        raise Corrupt(f"{path} is damaged: {error}", path=str(path)) from error

    def _take_up(self, path: Path) -> None:
        number = int(path.name.removeprefix("part-"))
        if number < self.manifest.parts:
            path.unlink()
            return
        try:
            rows, media = part.read(path)
            said, _ = names.split(rows)
        except Corrupt as error:
            log.warning("skipping %s in the recording: %s", path, error)
            path.rename(path.with_suffix(".torn"))
            return
        self.pending.update(said.rows)
        self._add(number, rows, media)

    def _add(self, number: int, rows: Any, media: Any) -> None:
        self._parts.append(number)
        self._bytes += rows.nbytes + media.nbytes
        self._schema = rows.schema
        self._media.update(media["media"].to_pylist())
        self.rows += rows.num_rows

    @property
    def _next(self) -> int:
        return max(self.manifest.parts, *(number + 1 for number in self._parts)) if self._parts else self.manifest.parts

    def seen(self, rows: Sequence[str]) -> list[bool]:
        """For each unique name, whether the row is in the recording and its ack is not confirmed. Such a row may be
        delivered again, and must not be written twice."""
        return [row in self.pending for row in rows]

    def write(self, batch: Batch, said: RowNames) -> None:
        """Commit rows as a part, which is on disk on return. A changed schema begins a new file. Raises LimitExceeded
        (the disk is full), Misuse, Corrupt (an invalid row), SchemaMismatch."""
        table, media = self._encoder.table(batch)
        rows = names.added(said, media, table)
        if self._schema is not None and not rows.schema.equals(self._schema, check_metadata=True):
            self.rotate()
        new = {found: data for found, data in self._encoder.contents.items() if found not in self._media}
        self._encoder.contents = {}
        number, contents = self._next, names.media_table(new)
        part.write(part_path(self.directory, number), rows, contents)
        self._add(number, rows, contents)
        self.pending.update(said.rows)

    def acknowledged(self, rows: Sequence[str]) -> None:
        """Remove rows from `pending`: their ack is confirmed."""
        self.pending.difference_update(rows)

    @property
    def due(self) -> bool:
        """Whether the parts are large enough for a file. After a failed rotation, only once they have grown by another
        file or `_AGAIN_S` has passed, because each attempt reads and compresses all of them."""
        if self._bytes < self._most or not self.failed:
            return self._bytes >= self._most
        return self._bytes >= self._again_bytes or time.monotonic() >= self._again_s

    def rotate(self) -> None:
        """Make a file of the parts. Raises LimitExceeded, Misuse, Corrupt (a damaged part) and
        SchemaMismatch (Parquet lacks a type). After an error, the rows are still in the recording."""
        try:
            if self._parts:
                self._rotate()
            self.failed = False
        except BaseException:
            self.failed = True
            self._again_s, self._again_bytes = time.monotonic() + _AGAIN_S, self._bytes + self._most
            raise

    def _rotate(self) -> None:
        first, last = self._parts[0], self._parts[-1]
        stem = f"{first:08d}-{last:08d}.parquet"
        media, rows = f"{MEDIA}/media-{stem}", f"{ROWS}/rows-{stem}"
        found = _FileRows()
        try:
            has_media = self._pack(self.directory / media, 1, found, "none")
            self._pack(self.directory / rows, 0, found, self._compression)
            file = File(
                rows, media if has_media else "", found.rows, (self.directory / rows).stat().st_size, (first, last),
                (found.lowest, found.highest),
            )  # fmt: skip
        except BaseException:
            for name in (media, rows):
                with suppress(OSError):
                    (self.directory / name).unlink(missing_ok=True)
            raise
        parts = self._parts
        self._tell(file)
        with file_errors(self.directory):  # after a failure, the next writer deletes the parts
            for number in parts:
                part_path(self.directory, number).unlink(missing_ok=True)
            sync(self.directory / OPEN)

    def _tell(self, file: File) -> None:
        """Add the file to the manifest. If that fails, the next writer deletes the file."""
        files, parts = self.manifest.files, self.manifest.parts
        self.manifest.files, self.manifest.parts = [*files, file], file.parts[1] + 1
        self.manifest.media, self.manifest.pending = self._encoder.media, sorted(self.pending)
        try:
            self.manifest.write(self.directory)
        except BaseException:
            if len(Manifest.read(self.directory).files) == len(files):  # else it names the file, perhaps not durably
                self.manifest.files, self.manifest.parts = files, parts
            raise
        finally:
            if self.manifest.parts > parts:  # the parts are in the file
                self._parts, self._bytes, self._schema = [], 0, None

    def _pack(self, path: Path, which: int, found: _FileRows, compression: str) -> bool:
        """Make a Parquet file of the rows (0) or the media (1) of all parts. Returns false if there are none."""
        tables = self._tables(which, found)
        with _arrow_errors(path):
            first = next(tables, None)
        if first is None:
            return False

        def fill(beside: Path) -> None:
            sums = which == 0 or not self.manifest.seed  # else the hash of a medium is its checksum
            own: list[str] | bool = _DICTIONARY if which == 0 else False
            statistics: list[str] | bool = _STATISTICS if which == 0 else ["media"]
            # Written by Arrow itself: a Python file would get a copy of each page.
            with _arrow_errors(path), pa.OSFile(str(beside), "wb") as file, pq.ParquetWriter(
                file, first.schema, compression=compression, compression_level=1 if compression == "zstd" else None,
                use_dictionary=own, write_statistics=statistics, write_page_checksum=sums,
            ) as writer:  # fmt: skip
                writer.write_table(first, row_group_size=max(1, first.num_rows))
                for table in tables:
                    writer.write_table(table, row_group_size=max(1, table.num_rows))

        make(path, fill)
        return True

    def _tables(self, which: int, found: _FileRows) -> Iterator[Any]:
        """The tables of the parts, joined to the size of a row group."""
        gathered: list[Any] = []
        for number in self._parts:
            table = part.read(part_path(self.directory, number))[which]
            if which == 0:
                found.add(table)
            if not table.num_rows:
                continue
            gathered.append(table)
            if sum(each.nbytes for each in gathered) >= _GROUP_BYTES:
                yield pa.concat_tables(gathered)
                gathered = []
        if gathered:
            yield pa.concat_tables(gathered)

    def close(self, *, complete: bool = False, skipped: int = 0) -> None:
        """Make a file of the parts, and store `complete` and the `skipped` rows in the manifest. Idempotent. Raises
        LimitExceeded, Misuse, Corrupt, SchemaMismatch."""
        if self._lock < 0:
            return
        try:
            self.manifest.skipped += skipped
            try:
                self.rotate()
                self.manifest.complete = complete
            finally:
                self.manifest.pending = [] if self.manifest.complete else sorted(self.pending)
                self.manifest.write(self.directory)
        finally:
            self.abort()

    def abort(self) -> None:
        """Release the lock, without a write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise SchemaMismatch(f"{path} can not be written as Parquet: {error}") from error


class _FileRows:
    """The number of rows of a file, and their lowest and highest policy version."""

    def __init__(self) -> None:
        self.rows, self.lowest, self.highest = 0, (1 << 63) - 1, -(1 << 63)

    def add(self, table: Any) -> None:
        versions = table[names.VERSION].to_numpy()
        self.rows += len(versions)
        self.lowest = min(self.lowest, int(versions.min()))
        self.highest = max(self.highest, int(versions.max()))
