from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.config import ClusterConfig, NodeConfig, _cgroup_limits, environment, parse_size
from dataplane.errors import Rejected
from tests.cases import each_case


@each_case(
    ("text", "nbytes"),
    [
        (0, 0), (12345, 12345), ("0", 0), ("17", 17), ("17B", 17), ("64MiB", 64 << 20),
        (" 1.5 GB ", 1_500_000_000), ("1KB", 1000), ("1KiB", 1024), ("2GiB", 2 << 30), ("3TiB", 3 << 40),
        ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_sizes_are_parsed_with_their_units(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@each_case(
    "text",
    [
        "",
        "MiB",
        "99999999TiB",
        "1 mib",
        "1XB",
        "1.MiB",
        "-1",
        "-1MiB",
        "1e9",
        "1 GiB 2",
        "0x10",
        "nan",
        -1,
        1.5,
        True,
        None,
    ],
)
def test_invalid_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)  # type: ignore[arg-type]


def test_relative_directories_are_resolved_when_the_configuration_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = NodeConfig(memory="2MiB", spill_dir="spill", data_dir="data")
    monkeypatch.chdir("/")
    assert config.spill_path == tmp_path / "spill"
    assert config.data_path == tmp_path / "data"
    assert NodeConfig(memory="2MiB").data_path is None
    with pytest.raises(ValueError, match="of its own"):
        NodeConfig(memory="2MiB", spill_dir=tmp_path, data_dir=tmp_path)


class Groups:
    """Files as the kernel shows control groups."""

    def __init__(self, directory: Path) -> None:
        self.own, self.root = directory / "cgroup", directory / "fs"
        self.root.mkdir()

    def belongs(self, *lines: str) -> None:
        self.own.write_text("".join(f"{line}\n" for line in lines))

    def limit(self, path: str, value: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    @property
    def limits(self) -> list[int]:
        return sorted(_cgroup_limits(self.own, self.root))


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_cgroup_version_2_limits_include_those_of_all_parent_groups(groups: Groups) -> None:
    groups.belongs("0::/kube/pod/container")
    groups.limit("kube/pod/container/memory.max", "max")
    groups.limit("kube/pod/memory.max", "3000")
    groups.limit("kube/memory.max", "2000")
    groups.limit("kube/other/memory.max", "1")
    assert groups.limits == [2000, 3000]


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATAPLANE_ADDRESS", "DATAPLANE_SPILL_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    nothing = environment()
    assert nothing.address is None
    assert os.access(nothing.spill_dir, os.W_OK)
    assert nothing.runtime_dir in (tempfile.gettempdir(), "/tmp")
    monkeypatch.setenv("DATAPLANE_ADDRESS", "")
    assert environment().address is None
    monkeypatch.setenv("DATAPLANE_ADDRESS", "unix:///a.sock")
    monkeypatch.setenv("DATAPLANE_SPILL_DIR", "/some/where")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a longer path is not used
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        said = environment()
    assert (said.address, said.spill_dir, said.runtime_dir) == ("unix:///a.sock", "/some/where", short)


def test_a_runtime_directory_whose_path_is_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert environment().runtime_dir == "/tmp"


# How a node is one of several: what is refused before anything listens.


@each_case(
    ("listen", "host"),
    [
        ("tcp://127.0.0.1:7000", "127.0.0.1"),
        ("tcp://127.9.9.9:0", "127.9.9.9"),
        ("tcp://[::1]:7000", "::1"),
        ("tcp://localhost:7000", "localhost"),
    ],
)
def test_loopback_needs_no_key(listen: str, host: str) -> None:
    assert ClusterConfig(listen, "etcd://127.0.0.1:1").host == host


BEYOND = [
    "tcp://10.0.0.1:7000", "tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://[::]:7000", "tcp://[fe80::1]:7000",
    "tcp://[::ffff:10.0.0.1]:7000", "tcp://host.example:7000", "tcp://localhost.example:7000",
    "tcp://128.0.0.1:7000", "tcp://127.0.0.1.example:7000", "tcp://0177.0.0.1:7000", "tcp://127.1:7000",
    "tcp://eth0:7000",
]  # fmt: skip


@each_case("listen", BEYOND)
def test_a_listen_address_beyond_loopback_requires_a_key(listen: str) -> None:
    with pytest.raises(ValueError, match="a key is needed"):
        ClusterConfig(listen, advertise="127.0.0.1")


@each_case(
    "listen",
    [
        "", "127.0.0.1:7000", "udp://127.0.0.1:7000", "TCP://127.0.0.1:7000", "tcp://", "tcp://127.0.0.1",
        "tcp://127.0.0.1:", "tcp://:7000", "tcp://127.0.0.1:x", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:７０００", "tcp://127.0.0.1:7000/", "tcp://[]:7000", "ipc:///tmp/x",
    ],
)  # fmt: skip
def test_invalid_listen_addresses_are_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT"):
        ClusterConfig(listen, key="cluster.key")


@each_case(
    ("settings", "said"),
    [
        ({"seeds": "a,b"}, "1, 3 or 5"),
        ({"seeds": "a,b,a:2379"}, "1, 3 or 5"),
        ({"seeds": "a,,b"}, "HOST:PORT"),
        ({"seeds": "a:0"}, "HOST:PORT"),
        ({"seeds": "a:65535"}, "next port"),
        ({"seeds": "a/x y"}, "name"),
        ({"seeds": "a", "join": "etcd://a:1"}, "without --join"),
        ({"seeds": "a", "key": None}, "goes with --key"),
        ({"seed_dir": "/x"}, "goes with --seeds"),
        ({"seeds": "a", "etcd_ca": "ca"}, "joined by etcd"),
        ({}, "by --seeds HOST"),
        ({"join": "etcd://a:1", "etcd_login": "f"}, "over TLS alone"),
        ({"join": "etcd://a:1", "etcd_cert": "f"}, "over TLS alone"),
    ],
)
def test_invalid_seeds_and_credentials_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterConfig("tcp://127.0.0.1:0", **{"key": "k", **settings})


@each_case(
    "join",
    [
        "10.0.0.1:7000", "tcp://10.0.0.1:7000", "etcd//10.0.0.1:7000", "://10.0.0.1:7000",
        "static://10.0.0.1:7000", "etcd:10.0.0.1:2379", "etcd://10.0.0.1", "etcd://10.0.0.1:0",
        "etcd://user@10.0.0.1:2379", "etcd://http://10.0.0.1:2379", "etcd://", "etcd:///name",
        "ETCD://10.0.0.1:2379",
    ],
)  # fmt: skip
def test_invalid_join_addresses_are_refused(join: str) -> None:
    """Found before anything is started: ZeroMQ would refuse some of them in the middle of the node's work."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        ClusterConfig("tcp://127.0.0.1:0", join)


def test_a_directory_for_spill_files_that_cannot_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default `spill` is 0 in a file system without free space, such as /proc. Only a directory that is there, or
    can be made, is taken for a full one."""
    with pytest.raises(Rejected, match=r"no directory can be made in /proc/no/such: .*set spill_dir"):
        NodeConfig(memory="2MiB", spill_dir="/proc/no/such")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    (tmp_path / "file").touch()
    with pytest.raises(Rejected, match=r"no directory can be made in .*/file: Not a directory"):
        NodeConfig(memory="2MiB", spill_dir=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="no space is free"):
        NodeConfig(memory="2MiB", spill_dir=tmp_path / "new" / "one")
    assert not (tmp_path / "new").exists()
