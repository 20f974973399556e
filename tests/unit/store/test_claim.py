from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.store.claim import Claim

_HOLD = """
import sys
from pathlib import Path
from dataplane.store.claim import Claim
claim = Claim(Path(sys.argv[1]), sys.argv[2])
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


def test_directories_of_dead_processes_are_swept_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    with (
        holding(tmp_path) as (living, _),
        holding(tmp_path) as (dead, process),
        holding(tmp_path, "other") as (
            foreign,
            other,
        ),
    ):
        assert len({living, dead, foreign}) == 3
        for victim in (process, other):
            victim.kill()
            victim.wait()
        assert (dead / "inner" / "file").exists()
        claim = Claim(tmp_path, "it")
        assert claim.reclaimed == 1
        assert not dead.exists()
        assert (living / "inner" / "file").exists()
        assert foreign.exists(), "it has another prefix"
        claim.release()
        assert sorted(tmp_path.iterdir()) == sorted([living, foreign])


def test_a_claim_is_private_and_its_release_removes_all_of_it(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "a" / "b", "it")
    assert claim.path.stat().st_mode & 0o777 == 0o700
    assert claim.path.parent == tmp_path / "a" / "b"
    assert claim.path.name.startswith("it-")
    (claim.path / "deep" / "er").mkdir(parents=True)
    (claim.path / "deep" / "file").write_bytes(b"x")
    claim.release()
    assert list((tmp_path / "a" / "b").iterdir()) == []
    claim.release()


def test_two_claims_of_one_process_are_two_directories(tmp_path: Path) -> None:
    first, second = Claim(tmp_path, "it"), Claim(tmp_path, "it")
    assert second.reclaimed == 0
    assert first.path.is_dir()
    assert first.path != second.path
    first.release()
    assert second.path.is_dir()
    second.release()


def test_what_is_no_directory_of_its_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "it-file").write_bytes(b"x")
    (tmp_path / "target").mkdir()
    (tmp_path / "it-link").symlink_to(tmp_path / "target")
    (tmp_path / "it-nowhere").symlink_to(tmp_path / "gone")
    Claim(tmp_path, "it").release()
    assert {path.name for path in tmp_path.iterdir()} == {"it-file", "it-link", "it-nowhere", "target"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "it-foreign"
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    Claim(tmp_path, "it").release()
    assert foreign.is_dir()


def test_a_parent_that_can_not_be_made_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="file"):
        Claim(tmp_path / "file" / "below", "it")


def test_claiming_while_others_release(tmp_path: Path) -> None:
    """A directory that is released while it is looked at is nobody's fault."""
    failures: list[BaseException] = []

    def claim_and_release() -> None:
        try:
            for _ in range(150):
                claim = Claim(tmp_path, "it")
                assert claim.path.is_dir()
                claim.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=claim_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []
