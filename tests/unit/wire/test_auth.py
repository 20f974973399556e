"""The cluster's key in its file: who may read it, what is none, and that none is ever lost."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from dataplane.wire import auth
from tests.cases import each_case

HEAD = b"dataplane key 1"


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def whole(public: bytes, secret: bytes) -> bytes:
    return b"\n".join([HEAD, public, secret, b""])


def test_a_new_key_file_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        auth.generate(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_the_secret_is_not_shown(tmp_path: Path) -> None:
    key = auth.generate(tmp_path / "key")
    assert key.secret.decode() not in repr(key)
    assert key.secret.decode() not in str(key)


@each_case("content", [b"", b"precious", b"dataplane key 1\n"])
def test_no_file_is_overwritten(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "key", content)
    with pytest.raises(FileExistsError):
        auth.generate(path)
    assert path.read_bytes() == content


def test_key_generation_follows_no_dangling_symlink(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        auth.generate(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@each_case("mode", [0o640, 0o604, 0o620, 0o601, 0o610, 0o602, 0o777])
def test_a_key_file_accessible_to_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    auth.generate(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}"):
        auth.load(tmp_path / "key")


PUBLIC, SECRET = zmq.curve_keypair()
NONE = {
    "empty": b"",
    "text": b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
    "a key of another version": whole(PUBLIC, SECRET).replace(b"key 1", b"key 2"),
    "the head alone": HEAD + b"\n",
    "no secret": HEAD + b"\n" + PUBLIC + b"\n",
    "short": whole(PUBLIC, SECRET[:-1]),
    "long": whole(PUBLIC, SECRET + b"0"),
    "more than a key": whole(PUBLIC, SECRET) + b"more",
    "more than a key, after an empty line": whole(PUBLIC, SECRET) + b"\nmore",
    "large": whole(PUBLIC, SECRET) + bytes(1 << 20),
    "not Z85": whole(b"\xff" * 40, b"~" * 40),
    "a secret that is not Z85": whole(PUBLIC, b"\x00" * 40),
    "halves of two keys": whole(PUBLIC, zmq.curve_keypair()[1]),
}


@each_case("what", NONE)
def test_a_file_that_contains_no_key_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(ValueError, match=r"is no key; `dataplane keygen FILE`"):
        auth.load(write(tmp_path / "key", NONE[what]))


def test_nodes_without_a_configured_key_share_one_key_per_user(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "dataplane"
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(auth.own, [directory] * 16))
    assert len(keys) == 1
    assert [each.name for each in directory.iterdir()] == ["key"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert auth.own(directory) in keys


@each_case("mode", [0o720, 0o702, 0o777])
def test_a_key_directory_writable_by_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(ValueError, match="XDG_STATE_HOME"):
        auth.own(tmp_path / "open")
    assert list((tmp_path / "open").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_no_key_is_taken_from_a_directory_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    with pytest.raises(ValueError, match="another user's"):
        auth.own(theirs)
