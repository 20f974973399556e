"""A file with the reference of the newest weights. The weights are in the plane.

The file is replaced atomically, so a reader sees a complete version. There is no lock, so a killed reader blocks no
other process. (`plane.weights` publishes weights with less code; this example shows how references are passed on.)
"""

from __future__ import annotations

import pickle
from pathlib import Path

import dataplane as dp


class Board:
    """One writer and any number of readers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, version: int, weights: dp.BatchRef) -> None:
        """Replace the published version by this one."""
        draft = self._path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps((version, weights)))
        draft.replace(self._path)

    def read(self) -> tuple[int, dp.BatchRef] | None:
        """The newest version and the reference to its weights; None if none was published yet."""
        try:
            newest: tuple[int, dp.BatchRef] = pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        return newest
