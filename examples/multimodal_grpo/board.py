"""Where the trainer pins up the reference of the newest weights: a file, which readers see whole or not at all.

The weights themselves are in the plane, as everything is. No lock: who is killed while he reads holds up nobody.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import dataplane as dp


class Board:
    """One writer, any number of readers. They see the newest, or nothing yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, version: int, weights: dp.BatchRef) -> None:
        """Put up this version in the place of what is there."""
        draft = self._path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps((version, weights)))
        draft.replace(self._path)

    def read(self) -> tuple[int, dp.BatchRef] | None:
        """The newest version and its weights."""
        try:
            newest: tuple[int, dp.BatchRef] = pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        return newest
