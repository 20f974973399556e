"""Nodes whose bytes go by other transports than tcp: each that is installed here, and what is done where one fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane import cli
from dataplane.transport import choice
from dataplane.transport.channels import TransportError
from dataplane.transport.tcp import Tcp
from tests.integration.test_hosts import Host, _serve, connected, members
from tests.processes import MIB, eventually

INSTALLED = {
    "ucx": importlib.util.find_spec("ucxx") is not None,
    "nixl": any(map(importlib.util.find_spec, ("nixl_cu13", "nixl_cu12", "nixl"))),
}


def needs(name: str) -> Any:
    reason = f"{name} is not installed: pip install rollout-dataplane[{name}]"
    return pytest.param(name, marks=pytest.mark.skipif(not INSTALLED[name], reason=reason))


each = pytest.mark.parametrize("name", [needs("ucx"), needs("nixl")])


class Broken(Tcp):
    name = "ucx"

    async def read(self, *_: Any) -> None:
        raise TransportError("broken")


def _serve_broken(*arguments: Any) -> None:
    choice.MAKERS = {**choice.MAKERS, "ucx": Broken}
    _serve(*arguments)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as undo:

        def make(one: tuple[str, ...], other: tuple[str, ...], **more: Any) -> tuple[Any, Any]:
            each = [{"transports": one}, {"transports": other}]
            _, (first, second) = undo.enter_context(connected(tmp_path, each=each, memory="64MiB", **more))
            return first, second

        yield make


def read_bytes(plane: Any) -> dict[str, int]:
    found: dict[str, int] = plane.members()["read_bytes"]
    return found


def columns(seed: int) -> dict[str, Any]:
    values = np.random.default_rng(seed).integers(0, 255, (1024, 8192), np.uint8)
    return {"x": values, "y": values[:, ::2].copy()}


def check(batch: Any, expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        assert np.array_equal(batch[name].numpy(), values)


@each
def test_batches_are_read_by_the_preferred_transport(made: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = made((name, "tcp"), (name, "tcp"))
    for seed in range(3):
        expected = columns(seed)
        ref = ours.put(expected)
        check(theirs.get(ref), expected)
        check(theirs.get(ref[100:200]), {key: values[100:200] for key, values in expected.items()})
        ours.free(ref)
    read = read_bytes(theirs)
    assert read[name] >= 3 * 12 * MIB
    assert read["tcp"] == 0
    assert cli.main(["members", theirs.address]) == 0
    assert f"by {name}" in capsys.readouterr().out


@each
def test_a_node_falls_back_to_tcp_when_its_peer_lacks_the_transport(made: Any, name: str) -> None:
    ours, theirs = made(("tcp",), (name, "tcp"))
    expected = columns(1)
    check(theirs.get(ours.put(expected)), expected)
    assert read_bytes(theirs)[name] == 0


def test_a_failing_transport_is_replaced_by_the_next_one(made: Any) -> None:
    """The first transport of both is one whose reads all fail: everything comes by the other."""
    ours, theirs = made(("ucx", "tcp"), ("ucx", "tcp"), serve=_serve_broken)
    for seed in range(4):
        expected = columns(seed)
        ref = ours.put(expected)
        check(theirs.get(ref), expected)
        ours.free(ref)
    read = read_bytes(theirs)
    assert (read["ucx"], read["tcp"] > 0) == (0, True)


def test_a_missing_transport_library_is_reported_with_its_install_command(tmp_path: Path) -> None:
    hide = "import sys; sys.modules.update(dict.fromkeys(['ucxx', 'nixl', 'nixl_cu12', 'nixl_cu13']))"
    arguments = ["node", "--memory", "16MiB", "--spill", "0", "--socket", str(tmp_path / "s")]
    arguments += ["--listen", "tcp://127.0.0.1:0", "--join", "etcd://127.0.0.1:1", "--transports"]
    calls = " + ".join(f"main({[*arguments, f'tcp,{name}']!r})" for name in ("ucx", "nixl"))
    script = f"{hide}; from dataplane.cli import main; sys.exit({calls})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert all(f"pip install rollout-dataplane[{name}]" in done.stderr for name in ("ucx", "nixl"))
    assert "Traceback" not in done.stderr


def test_the_transports_option_requires_the_listen_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["node", "--transports", "tcp"])
    assert "--listen" in capsys.readouterr().err


@each
def test_reads_from_a_killed_owner_fail_and_the_reader_continues(tmp_path: Path, name: str) -> None:
    with ExitStack() as undo:
        names = (name, "tcp")
        reader = undo.enter_context(Host(tmp_path / "reader", transports=names, memory="128MiB"))
        theirs = undo.enter_context(dp.connect(reader.address))
        for turn in range(3):
            with (
                Host(tmp_path / str(turn), reader, transports=names, memory="128MiB") as owner,
                dp.connect(owner.address) as ours,
            ):
                eventually(lambda: ours.stats().node in members(theirs), "they know each other")
                refs = [ours.put({"x": np.full((1, 12 * MIB), seed, np.uint8)}) for seed in range(3)]
                check(theirs.get(refs[0]), {"x": np.zeros((1, 12 * MIB), np.uint8)})  # they are connected
                with ThreadPoolExecutor(2) as pool:
                    reading = [pool.submit(theirs.get, ref) for ref in refs[1:]]
                    owner.kill()
                for future in reading:
                    assert isinstance(future.exception(), (dp.PeerUnavailable, dp.OwnerDied, type(None)))
        with Host(tmp_path / "another", reader, transports=names) as owner, dp.connect(owner.address) as ours:
            eventually(lambda: ours.stats().node in members(theirs), "they know each other")
            expected = columns(1)
            check(theirs.get(ours.put(expected)), expected)
