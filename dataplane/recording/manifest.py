"""What a recording is: its manifest, and the names of its files.

Invariants: the manifest is replaced as a whole, when what it names is on the disk. Disks that are full and paths
that can not be written raise LimitExceeded and Misuse here, and nothing else.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from dataplane.errors import Corrupt, LimitExceeded, Misuse, ProtocolMismatch

FORMAT = 1
NAME, ROWS, MEDIA, OPEN = "manifest.json", "rows", "media", "_open"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class File(msgspec.Struct):
    """A file of rows, below the recording's directory, and one of the media that came with them ("": none). `parts`:
    the first and the last that it was made of; `versions`: the lowest and the highest policy version."""

    rows: str
    media: str
    count: int
    nbytes: int
    parts: tuple[int, int]
    versions: tuple[int, int]


class Manifest(msgspec.Struct):
    """What `manifest.json` says. `media`: of columns, by path, whether their values are media. `pending`: rows that are
    here, though the stream was not told; `skipped`: how many rows were passed over, since the disk was full;
    `complete`: whether the stream was closed, and all of its rows are here; `seed`: of the hashes of media, drawn when
    the recording was begun."""

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
        """Put it on the disk. Raises LimitExceeded, Misuse."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        write(directory / NAME, lambda file: file.write(data))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a recording. Raises Misuse where there is none, Corrupt where it is damaged, ProtocolMismatch
        where it is of another format."""
        path = directory / NAME
        with typed(path):
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
    """Where a part is."""
    return directory / OPEN / f"part-{number:08d}"


def write(path: Path, fill: Callable[[Any], object]) -> None:
    """Make a file, filled by `fill`, that is under its name once all of it is on the disk. Raises as `typed`."""

    def by_file(beside: Path) -> None:
        with open(beside, "wb") as file:
            fill(file)

    make(path, by_file)


def make(path: Path, fill: Callable[[Path], object]) -> None:
    """As `write`; `fill` is told what it is to write, which is there and empty."""
    beside = path.with_name(f".{secrets.token_hex(6)}.tmp")
    with typed(path):
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
    """Put the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def typed(path: Path) -> Iterator[None]:
    """What the system says of files, as errors of ours: LimitExceeded (the disk is full), Corrupt, Misuse."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = f"bytes on the disk of {path}"
            raise LimitExceeded(
                f"the recording does not fit on the disk of {path}: {error.strerror}", what=what
            ) from None
        if error.errno == errno.EIO:
            raise Corrupt(f"{path} can not be read or written: {error.strerror}", path=str(path)) from None
        raise Misuse(f"{path} can not be read or written: {error.strerror or error}") from None
