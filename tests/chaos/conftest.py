"""Chaos: real processes are killed, stopped, starved and lied to: a test or more for each fault of one host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import etcd, processes


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    processes.warm()
    with etcd.shared():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mounted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)
