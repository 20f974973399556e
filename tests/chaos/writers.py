"""Many processes that each put once and stay: `python -m tests.chaos.writers ADDRESS COUNT`.

Says a dot for each that was served, and an x for each that was not. They end with its standard input. A small process
makes them, since to fork a large one so often takes long.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys

from dataplane.wire import messages as m
from tests.chaos.raw import Raw, one_column

NBYTES = 1 << 20


def put_and_stay(address: str) -> None:
    """Put by shared memory as a client of its own, and say so."""
    raw = Raw(address)
    reply = raw.ask(m.Reserve(raw.next(), [NBYTES], 20.0))
    shard, _, offset, _ = reply.extents[0]
    with mmap.mmap(raw.descriptors[0], os.fstat(raw.descriptors[0]).st_size) as memory:
        memory[offset : offset + 8] = shard.to_bytes(8, "little")
    sealed = raw.ask(m.Seal(raw.next(), [(shard, one_column(NBYTES))], "", False))
    os.write(1, b"." if isinstance(sealed, m.Done) else b"x")
    os.read(0, 1)


def main() -> None:
    """The command."""
    pids = []
    for _ in range(int(sys.argv[2])):
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(60)
                put_and_stay(sys.argv[1])
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
