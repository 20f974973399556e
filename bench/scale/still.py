"""Nodes and clients that sleep at once when they have nothing to do: `python -m bench.scale.still node ...` is
`dataplane node`, so.

Else a process that waits for an answer looks for it for up to 400 microseconds (`dataplane.wire.polling`), which counts
as processor time though a busy process would have none to look in, and the sum of a call's costs would be mostly that.
"""

from __future__ import annotations

import sys

from dataplane import cli
from dataplane.wire import polling


def still() -> None:
    """From now on, loops of this process do not poll."""
    polling._MOST_S = polling._FIRST_S = 0.0


if __name__ == "__main__":
    still()
    sys.exit(cli.main())
