"""The files of a checkpoint's directory: `metadata.json` lists each with its size and digest, and has a digest of
itself.

Invariants: `content` returns the bytes that were written to that file of that checkpoint, or raises `Corrupt`: a
file that was changed, exchanged with another, or taken from another checkpoint has another digest than is listed.
Checkpoints of version 1, which list nothing, are refused by `ProtocolMismatch`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from dataplane.errors import Corrupt, ProtocolMismatch

NAME = "metadata.json"
_VERSION = 2
_PIECE = 16 << 20


class Manifest:
    """The files of one directory, as its `metadata.json` lists them."""

    def __init__(self, directory: Path) -> None:
        """Raises Corrupt, ProtocolMismatch."""
        self._directory = directory
        self._files = _files(directory)

    def names(self, suffix: str) -> list[str]:
        """The files with this suffix, in the order in which they were written."""
        return [name for name in self._files if name.endswith(suffix)]

    def check(self) -> None:
        """Raises Corrupt if a file was changed."""
        for name in self._files:
            self._compare(name, *_measured(self._path(name)))

    def content(self, name: str) -> bytes:
        """All bytes of a file. Raises Corrupt."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _corrupt(path, f"can not be read: {error.strerror}") from error
        self._compare(name, len(data), xxhash.xxh3_128_hexdigest(data))
        return data

    def _path(self, name: str) -> Path:
        return self._directory / name

    def _compare(self, name: str, size: int, digest: str) -> None:
        if self._files.get(name) != (size, digest):
            raise _corrupt(self._path(name), "is not the file that was written there")


def write(directory: Path, files: list[str], user_metadata: dict[str, Any]) -> None:
    """Write the list of these files of the directory."""
    listed = {name: list(_measured(directory / name)) for name in files}
    content = {"version": _VERSION, "storage_saved": True, "user_metadata": user_metadata, "files": listed}
    content = json.loads(json.dumps(content))  # as it will be read: JSON's keys are text
    (directory / NAME).write_text(json.dumps(content | {"digest": _digest(content)}, indent=2))


def _files(directory: Path) -> dict[str, tuple[int, str]]:
    path = directory / NAME
    try:
        content = json.loads(path.read_bytes())
        version, digest = content["version"], content.pop("digest", "")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _corrupt(path, f"is none of a checkpoint: {error}") from error
    if version == 1 and not digest and "files" not in content:
        raise ProtocolMismatch(
            f"{directory} is a checkpoint of version 1, which does not list its files: load it with the version of "
            "dataplane that saved it, and save it again with this one",
            ours=str(_VERSION), theirs="1",
        )  # fmt: skip
    if version != _VERSION or digest != _digest(content):
        raise _corrupt(path, "is not what was written there")
    try:
        return {name: (size, digest) for name, (size, digest) in content["files"].items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _corrupt(path, f"lists no files: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    """The digest of the content, independent of its formatting."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _measured(path: Path) -> tuple[int, str]:
    state, size = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(_PIECE):
                state.update(data)
                size += len(data)
    except OSError as error:
        raise _corrupt(path, f"can not be read: {error.strerror}") from error
    return size, state.hexdigest()


def _corrupt(path: Path, what: str) -> Corrupt:
    return Corrupt(f"{path} {what}", path=str(path))
