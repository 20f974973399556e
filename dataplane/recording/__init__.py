"""Recordings: rows of a stream in a directory of Parquet files that other programs can read. Values are read back bit
for bit. A part is a file with the rows of one commit.

    DIR/manifest.json        the stream, its columns and the files, replaced as a whole
    DIR/rows/*.parquet       the rows, in the order in which they were recorded
    DIR/media/*.parquet      images and other large values, each once, with the hash of its bytes
    DIR/_open/               parts that are not yet in a Parquet file

Invariants: a part gets its final name after all of its bytes are on disk, so an acked row is in the recording unless
it was skipped. A part is in one file at most. Files that the manifest does not name are ignored. One process writes a
recording at a time. Nothing in a recording is unpickled.

This package handles files and tables only: `stream.record` is in `client.recorder`, `plane.replay` in `client.replay`.
"""

from dataplane.recording.manifest import Manifest
from dataplane.recording.names import RowNames
from dataplane.recording.reader import Reader, Recorded
from dataplane.recording.writer import Writer

__all__ = ["Manifest", "Reader", "Recorded", "RowNames", "Writer"]
