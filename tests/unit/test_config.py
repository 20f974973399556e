from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from dataplane.config import (
    NodeConfig,
    _cgroup_limits,
    environment,
    parse_size,
)
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
    "text", ["", "MiB", "1 mib", "1XB", "1.MiB", "-1", "-1MiB", "1e9", "1 GiB 2", "0x10", "nan", -1, 1.5, True, None]
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
