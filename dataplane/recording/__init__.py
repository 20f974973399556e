"""Recordings: rows of a stream in a directory of Parquet files, which other programs can read. Values are read back bit
for bit. A part is the rows of one commit.

    DIR/manifest.json        the stream, its columns, the files; replaced as a whole
    DIR/rows/*.parquet       the rows, in the order in which they were done
    DIR/media/*.parquet      images and other large values, each once, by the hash of their bytes
    DIR/_open/               parts that are not yet in a Parquet file

Invariants: a part has its final name only after all of it is on disk, so an acknowledged row is in the recording; a
part is in one file at most, and files that the manifest does not name are ignored; a recording is written by one
process at a time. Nothing in it is ever unpickled.

This package has only files and tables; `stream.record` is in `client.recorder`, `plane.replay` in `client.replay`.
"""

from dataplane.recording.manifest import Manifest
from dataplane.recording.names import RowNames
from dataplane.recording.reader import Reader, Recorded
from dataplane.recording.writer import Writer

__all__ = ["Manifest", "Reader", "Recorded", "RowNames", "Writer"]
