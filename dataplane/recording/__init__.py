"""Recordings: rows of a stream in a directory of Parquet files, which other programs read too, and read back bit-exact.

    DIR/manifest.json        what is recorded: the stream, its columns, its files; replaced as a whole
    DIR/rows/*.parquet       the rows, in the order in which they were done
    DIR/media/*.parquet      images and other large values, each once, by the hash of their bytes
    DIR/_open/               parts that are not in such files yet

Invariants: a part is under its name once all of it is on the disk, so a row that was acknowledged is in the
recording; a part is in one file at most, and what the manifest does not name counts only as a part; a recording is
written by one process at a time. Nothing in it is ever unpickled.

Here are files and tables alone. `stream.record` and `plane.replay` (`client.recorder`, `client.replaying`) do the rest.
"""

from dataplane.recording.manifest import Manifest
from dataplane.recording.names import RowNames
from dataplane.recording.reader import Reader, Recorded
from dataplane.recording.writer import Writer

__all__ = ["Manifest", "Reader", "Recorded", "RowNames", "Writer"]
