"""The manifest of a recording, and the names of its files.

Invariants: the manifest is replaced as a whole, after the files that it names are on disk. Errors of the file system
become LimitExceeded (a full disk), Corrupt (an I/O error) or Misuse (any other, such as a path that cannot be written).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dataplane.errors import Corrupt, Misuse, ProtocolMismatch
from dataplane.file_errors import file_errors

FORMAT = 1
NAME, ROWS, MEDIA, OPEN = "manifest.json", "rows", "media", "_open"


class File(msgspec.Struct):
    """A file of rows. `rows`, `media`: the paths of this file and the file of its media ("": none), below the
    recording's directory. `parts`: the first and the last part in it. `versions`: the lowest and the highest policy
    version."""

    rows: str
    media: str
    count: int
    nbytes: int
    parts: tuple[int, int]
    versions: tuple[int, int]


class Manifest(msgspec.Struct):
    """The content of `manifest.json`. `media`: for each column, by path, whether its values are media. `parts`: the
    number of the first part that is not yet in a file. `pending`: recorded rows whose ack is not confirmed. `skipped`:
    the number of rows left out because of a full disk or another error. `complete`: whether the last recorder came to
    the end of the stream and skipped no row. `seed`: of the hashes of media, random for each recording."""

    stream: str
    tasks: list[str]
    columns: list[str]
    settings: dict[str, Any] = {}
    format: int = FORMAT
    media: dict[str, bool] = {}
    files: list[File] = []
    parts: int = 0
    pending: list[str] = []
    skipped: int = 0
    complete: bool = False
    seed: int = 0

    def write(self, directory: Path) -> None:
        """Replace the manifest on disk. Raises LimitExceeded, Misuse, Corrupt."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        write(directory / NAME, lambda file: file.write(data))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the recording in `directory`. Raises Misuse if there is none, Corrupt if it is damaged,
        ProtocolMismatch if it has another format."""
        path = directory / NAME
        with file_errors(path):
            if not directory.exists():
                raise Misuse(f"there is no directory {directory}: a recording is in the directory that record() wrote")
            if not path.exists():
                raise Misuse(f"{directory} is no recording: it has no {NAME}")
            data = path.read_bytes()
        try:
            found = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path} is no manifest of a recording: {error}", path=str(path)) from error
        if found.format != FORMAT:
            raise ProtocolMismatch(
                f"{directory} is a recording of format {found.format}", ours=str(FORMAT), theirs=str(found.format)
            )
        for each in found.files:
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in (each.rows, each.media)):
                raise Corrupt(f"{path} names a file outside of the recording", path=str(path))
        return found


def part_path(directory: Path, number: int) -> Path:
    """The path of the part of this number."""
    return directory / OPEN / f"part-{number:08d}"


def write(path: Path, fill: Callable[[Any], object]) -> None:
    """Create a file, which gets its name after `fill` has written it and it is on disk. Raises LimitExceeded, Misuse,
    Corrupt, and the errors of `fill`."""

    def by_file(beside: Path) -> None:
        with open(beside, "wb") as file:
            fill(file)

    make(path, by_file)


def make(path: Path, fill: Callable[[Path], object]) -> None:
    """Create a file as `write` does, but pass the path of an empty file to `fill`."""
    beside = path.with_name(f".{secrets.token_hex(6)}.tmp")
    with file_errors(path):
        try:
            with open(beside, "xb") as file:
                fill(beside)
                os.fsync(file.fileno())
            os.replace(beside, path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


def sync(directory: Path) -> None:
    """Flush the names in a directory to disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
