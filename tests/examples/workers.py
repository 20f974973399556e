"""What a process of a test runs, apart from the tests: who runs it need not import torch with them."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection


def report_and_wait(reports: Connection) -> None:
    """Say that it is there, and stay for a minute."""
    reports.send("here")
    time.sleep(60)
