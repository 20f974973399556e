from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.store.directory_claim import DirectoryClaim

STRANGER = 12345  # a user of whom there is nothing here

_HOLD = """
import sys
from pathlib import Path
from dataplane.store.directory_claim import DirectoryClaim
claim = DirectoryClaim(Path(sys.argv[1]), sys.argv[2])
(claim.path / "inner").mkdir()
(claim.path / "inner" / "file").write_bytes(b"x")
print(claim.path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(parent: Path, prefix: str = "it") -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A process that holds a claim until it is killed."""
    command = [sys.executable, "-c", _HOLD, str(parent), prefix]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def test_directories_of_dead_processes_are_swept_and_live_ones_are_not(tmp_path: Path) -> None:
    with (
        holding(tmp_path) as (living, _),
        holding(tmp_path) as (dead, process),
        holding(tmp_path, "other") as (foreign, other),
    ):
        assert len({living, dead, foreign}) == 3
        for victim in (process, other):
            victim.kill()
            victim.wait()
        assert (dead / "inner" / "file").exists()
        claim = DirectoryClaim(tmp_path, "it")
        assert not dead.exists()
        assert (living / "inner" / "file").exists()
        assert foreign.exists(), "it has another prefix"
        claim.release()
        assert sorted(tmp_path.iterdir()) == sorted([living, foreign])


def test_entries_that_are_no_claimed_directory_are_not_swept(tmp_path: Path) -> None:
    (tmp_path / "it-00000001").write_bytes(b"x")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_bytes(b"x")
    (tmp_path / "it-00000002").symlink_to(tmp_path / "target")
    (tmp_path / "it-00000003").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "it-00000004")
    (tmp_path / "it-notes").mkdir()
    before = sorted(tmp_path.rglob("*"))
    DirectoryClaim(tmp_path, "it").release()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "it-0123abcd"
    foreign.mkdir()
    (foreign / "file").write_bytes(b"x")
    os.chown(foreign, STRANGER, STRANGER)
    DirectoryClaim(tmp_path, "it").release()
    assert (foreign / "file").exists()


def locking(path: Path, user: int) -> subprocess.Popen[str]:
    """A process of another user that holds a lock on a directory until its input ends."""
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    process = subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.setuid(user),
    )
    assert process.stdout is not None
    if process.stdout.readline() != "1\n":
        process.communicate()
        pytest.skip("another user has no Python here")
    return process


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory as /var/tmp is: everybody may write there, and remove what is theirs."""
    made = Path(tempfile.mkdtemp(prefix="public-", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_users_lock_on_the_parent_does_not_block_a_claim(public: Path) -> None:
    stranger = locking(public, STRANGER)
    try:
        claim = DirectoryClaim(public, "it")
        assert claim.path.is_dir()
        claim.release()
    finally:
        stranger.communicate()
    assert list(public.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_the_error_for_an_unwritable_parent_names_its_owner_and_the_remedy(public: Path) -> None:
    theirs = public / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, STRANGER, STRANGER)
    os.seteuid(STRANGER + 1)
    try:
        with pytest.raises(PermissionError) as caught:
            DirectoryClaim(theirs, "it", remedy="set it to another")
    finally:
        os.seteuid(0)
    said = str(caught.value)
    assert all(part in said for part in (str(theirs), f"it is user {STRANGER}'s", "set it to another")), said
