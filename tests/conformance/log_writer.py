"""Writes a log in a data directory until it is killed: `python -m tests.conformance.log_writer DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

from dataplane.store.durable.database import Database
from dataplane.store.durable.log import SQLiteStorage
from tests.conformance.test_storages import ME, write_until_killed

if __name__ == "__main__":
    write_until_killed(SQLiteStorage(Database(Path(sys.argv[1]) / "node.sqlite"), "p", ME))
