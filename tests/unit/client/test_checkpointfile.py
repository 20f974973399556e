"""The file of a checkpoint: all that was written, or an error; under its name when it is whole, and not before."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from dataplane.client.checkpointfile import BLOCK, COLUMNS, END, HEAD, MAGIC, TABLE, CheckpointReader, CheckpointWriter
from dataplane.errors import Corrupt, LimitExceeded
from tests.processes import MIB, Worker

FRAMES = [(HEAD, b"head"), (BLOCK, b""), (COLUMNS, b"\0\xff" * 7), (TABLE, bytes(range(40))), (END, b"\x05")]


@pytest.fixture(params=["nameless", "named"])
def how(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """With files without names, and as on a file system that has none."""
    if request.param == "named":
        opened = os.open

        def open_named(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return opened(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", open_named)
    return str(request.param)


def write(path: Path, frames: list[tuple[int, Any]] = FRAMES) -> None:
    with CheckpointWriter(path) as file:
        for kind, payload in frames:
            file.frame(kind, payload)
        file.commit()


def read(path: Path) -> list[tuple[int, bytes]]:
    """All frames, as whoever restores reads them: to the one that says it is the last."""
    found = []
    with CheckpointReader(path) as file:
        while not found or found[-1][0] != END:
            found.append(file.frame())
        if not file.ended:
            raise file.corrupt("goes on after its end")
    return found


@pytest.mark.usefixtures("how")
def test_a_checkpoint_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "stream.dp"
    big = bytearray(os.urandom(3 * MIB))
    write(path, [*FRAMES[:-1], (TABLE, memoryview(big).cast("Q")), FRAMES[-1]])
    assert read(path) == [*FRAMES[:-1], (TABLE, bytes(big)), FRAMES[-1]]
    assert path.read_bytes().startswith(MAGIC)
    assert os.listdir(tmp_path) == ["stream.dp"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with CheckpointReader(str(path)) as file:
        assert file.size == path.stat().st_size
        assert not file.ended


@pytest.mark.usefixtures("how")
def test_a_checkpoint_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "stream.dp"
    with CheckpointWriter(path) as file:
        file.frame(HEAD, b"x" * MIB)
        assert not path.exists()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ZeroDivisionError), CheckpointWriter(path) as file:
        file.frame(HEAD, b"x")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def filler(pipe: Any, path: Path) -> None:
    """Writes more than it may; says how often that was noticed, and what is there."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    for frame in (4 * MIB, 1000):  # in one, and by many that wait in a buffer
        try:
            with CheckpointWriter(path) as file:
                for _ in range(4 * MIB // frame):
                    file.frame(TABLE, bytes(frame))
                file.commit()
        except LimitExceeded as error:
            pipe.send((error.what, os.listdir(path.parent)))


def test_a_full_disk_leaves_no_checkpoint_file(tmp_path: Path) -> None:
    path = tmp_path / "stream.dp"
    with Worker(filler, path) as worker:
        for _ in range(2):
            what, left = worker.hear()
            assert str(path) in what
            assert left == []
        assert worker.join() == 0


@pytest.fixture
def changed(tmp_path: Path) -> tuple[bytes, Path]:
    """A small file, and where to put what becomes of it."""
    write(tmp_path / "stream.dp")
    return (tmp_path / "stream.dp").read_bytes(), tmp_path / "changed.dp"


def test_a_checkpoint_file_with_any_altered_byte_is_corrupt(changed: tuple[bytes, Path]) -> None:
    whole, path = changed
    for at in range(len(whole)):
        for flipped in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flipped]) + whole[at + 1 :])
            with pytest.raises(Corrupt):
                read(path)


def laid_out(whole: bytes) -> list[bytes]:
    """The beginning of a file and its frames, as they lie in it."""
    found, at = [whole[:16]], 16
    while at < len(whole):
        end = at + 24 + int.from_bytes(whole[at + 8 : at + 16], "little")
        found.append(whole[at:end])
        at = end
    return found


def test_a_checkpoint_file_with_moved_repeated_or_foreign_frames_is_corrupt(changed: tuple[bytes, Path]) -> None:
    whole, path = changed
    write(path)  # the same frames in another file
    older = path.read_bytes()
    one, other = laid_out(whole), laid_out(older)
    places = range(len(one))
    found = [one[:i] + one[i + 1 :] for i in places]
    for i in places:
        for j in places:
            found.append([*one[:j], one[i], *one[j:]])
            found.append([*one[:i], other[j], *one[i + 1 :]])
            found.append(one[:i] + other[j:])
            moved = one[:i] + one[i + 1 :]
            found.append([*moved[:j], one[i], *moved[j:]])
            swapped = list(one)
            swapped[i], swapped[j] = one[j], one[i]
            found.append(swapped)
    for pieces in found:
        if (data := b"".join(pieces)) not in (whole, older):
            path.write_bytes(data)
            with pytest.raises(Corrupt, match=r"\(at byte \d+\)") as error:
                read(path)
            assert error.value.path == str(path)
