"""File systems of a test's own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, *options: str, kind: str = "tmpfs") -> Iterator[Path]:
    """One at this directory, which is made; the test is skipped where mounting is not permitted."""
    directory.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    command = ["mount", "-t", kind, *options, kind, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
