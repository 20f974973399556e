"""Recorders in processes of their own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import dataplane as dp


def records(pipe: Connection, address: str, path: Path, rows: int) -> None:
    with dp.connect(address) as plane:
        recording = plane.stream("rollouts").record(path, ["ids", "x"], rows=rows, max_file_bytes=4000)
        pipe.send("on")
        recording.wait()
        pipe.send(recording.statistics().rows)
