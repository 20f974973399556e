"""A disk that turns read-only, files that are replaced by what never answers, and no thread to be had."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.config import NodeConfig
from dataplane.node.node import Node, run
from tests.cases import each_case
from tests.processes import MIB, StandingNode, Worker, eventually, pattern


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB, writable at the end."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield directory
    remount(directory, "rw")
    subprocess.run(["umount", str(directory)], check=True)


def remount(directory: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.spill"))


def number(ref: dp.BatchRef) -> int:
    ((_, shard),) = ref.shards()
    return shard


def on_disk(directory: Path, refs: list[dp.BatchRef]) -> list[dp.BatchRef]:
    there = {int(path.stem, 16) for path in files(directory)}
    return [ref for ref in refs if number(ref) in there]


@pytest.mark.long
def test_what_is_freed_on_a_disk_that_turned_read_only_counts_until_it_can_be_deleted(
    tmp_path: Path, mounted: Path
) -> None:
    with (
        StandingNode(tmp_path, memory="8MiB", spill="24MiB", spill_dir=mounted) as node,
        dp.connect(node.address) as plane,
    ):
        refs = [plane.put({"x": pattern(seed, MIB)}) for seed in range(20)]
        eventually(lambda: plane.stats().spilled_shards >= 12, "they are on disk")
        spilled = on_disk(mounted, refs)
        remount(mounted, "ro")
        used = plane.stats().disk_used
        for ref in spilled[:3]:
            plane.free(ref)
        eventually(lambda: "deleting failed: Read-only" in plane.stats().spill_error, "the error is named")
        assert plane.stats().disk_used == used == sum(path.stat().st_blocks * 512 for path in files(mounted))
        assert np.array_equal(plane.get(spilled[4])["x"].numpy(), pattern(refs.index(spilled[4]), MIB))
        remount(mounted, "rw")
        eventually(lambda: plane.stats().spill_error == "", "it goes on")
        for ref in refs:
            plane.free(ref)
        eventually(lambda: (plane.stats().disk_used, files(mounted)) == (0, []), "all of it is deleted")
        assert node.kill(signal.SIGTERM) == 0
    assert list(mounted.iterdir()) == []


def test_a_put_on_a_disk_that_turned_read_only_is_backpressure_that_names_it(tmp_path: Path, mounted: Path) -> None:
    """With read-back batches pinned and the quota full: their files are to make way for others, and can not."""
    with (
        StandingNode(tmp_path, memory="8MiB", spill="12MiB", spill_dir=mounted) as node,
        dp.connect(node.address) as plane,
        dp.connect(node.address) as neighbour,
    ):
        refs: list[dp.BatchRef] = []
        with pytest.raises(dp.Backpressure):
            while True:
                refs.append(plane.put({"x": pattern(len(refs), MIB)}, timeout=0.3))
        spilled = on_disk(mounted, refs)
        kept = [ref for ref in refs if ref not in spilled]
        for ref in kept[:3]:
            plane.free(ref)
        views = [plane.get(ref)["x"].numpy() for ref in spilled[:3]]
        remount(mounted, "ro")
        for _ in range(3):
            with pytest.raises(dp.Backpressure) as caught:
                plane.put({"x": pattern(1, 2 * MIB)}, timeout=0.3)
        assert "Read-only" in caught.value.spill_error
        assert np.array_equal(neighbour.get(kept[3])["x"].numpy(), pattern(refs.index(kept[3]), MIB))
        assert np.array_equal(views[1], pattern(refs.index(spilled[1]), MIB))
        remount(mounted, "rw")
        again = plane.put({"x": pattern(99, 2 * MIB)}, timeout=60)
        assert np.array_equal(plane.get(again)["x"].numpy(), pattern(99, 2 * MIB))
        views.clear()
        assert node.kill(signal.SIGTERM) == 0
    assert list(mounted.iterdir()) == []


# In place of a file: each of these is given its path, and that of a sound one


def pipe(path: Path, sound: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, sound: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def link(path: Path, sound: Path) -> None:
    path.symlink_to(sound)


def device(path: Path, sound: Path) -> None:
    """One that gives zeros for ever."""
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make a device")


@pytest.mark.long
@each_case("replaced", [pipe, directory, link, device])
def test_what_is_no_spill_file_any_more_holds_up_nobody(tmp_path: Path, replaced: Callable[[Path, Path], None]) -> None:
    """All files but one: who reads them is told, who reads what is in memory or sound is served, and the node ends."""
    with (
        StandingNode(tmp_path, memory="8MiB") as node,
        dp.connect(node.address) as plane,
    ):
        refs = [plane.put({"x": pattern(seed, MIB)}) for seed in range(20)]
        eventually(lambda: plane.stats().spilled_shards >= 12, "they are on disk alone")
        sound, *victims = files(tmp_path / "spill")
        for victim in victims:
            victim.unlink()
            replaced(victim, sound)
        lost: list[str] = []
        for seed, ref in enumerate(refs):
            try:
                assert np.array_equal(plane.get(ref, timeout=60)["x"].numpy(), pattern(seed, MIB))
            except dp.Corrupt as error:
                lost.append(error.path)
        assert len(lost) >= 11
        assert set(lost) <= set(map(str, victims))
        for ref in refs:
            plane.free(ref)
        eventually(lambda: plane.stats().disk_used == 0, "all of it is deleted, or is no more")
        assert node.kill(signal.SIGTERM) == 0
    assert list((tmp_path / "spill").iterdir()) == []


# Threads

_USER = 54_321  # of whom there is no other process


def as_a_user_without_threads(pipe: Any, path: Path, early: bool) -> None:
    """A node whose user may start no thread: from the beginning, or from when it is there."""
    os.setgid(_USER)
    os.setuid(_USER)
    if early:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        node = Node(NodeConfig(memory="8MiB", spill="40MiB", spill_dir=path, prewarm=0), path / "s")
    except OSError as error:
        pipe.send(str(error))
        return
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    run(node, ready=lambda: pipe.send(node.address))


def client_of_that_user(pipe: Any, address: str) -> None:
    os.setgid(_USER)
    os.setuid(_USER)
    plane = dp.connect(address)
    refs = [plane.put({"x": pattern(seed, MIB)}, timeout=60) for seed in range(30)]
    right = [bool(np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, MIB))) for seed, ref in enumerate(refs)]
    spilled = plane.stats().spilled_bytes
    for ref in refs:
        plane.free(ref)
    plane.close()
    pipe.send((all(right), spilled))


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory of another user's, where all of the way is theirs to go."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    made = Path(tempfile.mkdtemp(prefix="theirs-", dir="/tmp"))
    os.chown(made, _USER, _USER)
    yield made
    shutil.rmtree(made)


@pytest.mark.long
def test_a_node_spills_where_no_thread_can_be_started_any_more(theirs: Path) -> None:
    with Worker(as_a_user_without_threads, theirs, False) as node:
        address = node.hear()
        with Worker(client_of_that_user, address) as client:
            right, spilled = client.hear()
            assert right
            assert spilled >= 20 * MIB
        assert node.kill(signal.SIGTERM) == 0
    assert list(theirs.iterdir()) == []


@pytest.mark.long
def test_a_node_that_can_start_no_thread_says_so_and_leaves_nothing(theirs: Path) -> None:
    with Worker(as_a_user_without_threads, theirs, True) as node:
        assert "no thread can be started" in node.hear()
        node.join()
    assert list(theirs.iterdir()) == []
