"""The `dataplane` command against a real node, and `dataplane top` in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import dataplane as dp
from dataplane import cli
from tests.cases import each_case
from tests.processes import WAIT_S, StandingNode


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", tasks=["actor"])
        stream.append({"id": [1, 2, 3]})
        yield node.address


def test_status_shows_the_streams(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", address]) == 0
    assert "actor: 3 pending, 0 leased, 0 acked" in capsys.readouterr().out
    assert cli.main(["status", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["streams"]["rollouts"]["task"]["actor"]["pending"] == 3
    piped = subprocess.run(["sh", "-c", f"{sys.executable} -m dataplane.cli status {address} | true"], stderr=-1)
    assert piped.stderr == b""


def test_status_finds_this_users_one_node_and_names_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TemporaryDirectory(dir="/tmp") as runtime:  # a socket's path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
        config = dp.NodeConfig(memory="1MiB", spill=0, prewarm=0)
        with pytest.raises(SystemExit):
            cli.main(["status"])
        assert f"no node of yours was found in {runtime}" in capsys.readouterr().err
        with dp.connect(config=config) as first:
            del os.environ["DATAPLANE_ADDRESS"]  # which `connect` has set
            assert cli.main(["status", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["address"] == first.address
            with dp.connect(config=config) as second:
                os.environ.pop("DATAPLANE_ADDRESS", None)
                with pytest.raises(SystemExit):
                    cli.main(["status"])
                said = capsys.readouterr().err
                assert first.address in said
                assert second.address in said


@each_case("command", ["status", "top"])
def test_commands_fail_when_no_node_listens_at_the_address(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, f"unix://{tmp_path}/none.sock"]) == 1
    assert f"dataplane {command}: " in capsys.readouterr().err


def test_a_node_started_again_on_its_directory_is_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dataplane.cli", "node", "--memory", "1MiB", "--spill", "0", "--prewarm", "0"]
    command += ["--data-dir", str(tmp_path / "data")]
    nodes = []
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            with dp.connect(running.stdout.readline().strip().partition("=")[2]) as plane:
                nodes.append(plane.stats().node)
            if len(nodes) == 2:
                second = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
                assert second.returncode == 1
                assert "another node runs on it" in second.stderr
                assert "Traceback" not in second.stderr
            running.send_signal(end)
    assert len(set(nodes)) == 1


class Terminal:
    """`dataplane top` in a terminal of 100 columns and 30 lines."""

    def __init__(self, address: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [sys.executable, "-m", "dataplane.cli", "top", "--interval", "0.1", address]
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
        self._theirs = theirs  # kept open, so that its state can be read after the command's end
        self.before = termios.tcgetattr(theirs)
        self.shown = b""

    def until(self, text: bytes, times: int = 1) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.shown.count(text) < times:
            assert time.monotonic() < deadline, f"never shown: {text!r} in {self.shown!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 1 << 16)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        self.until(b"\x1b[?1049l")
        assert self.process.wait(WAIT_S) == self.process.returncode
        assert termios.tcgetattr(self._theirs) == self.before, "the terminal is as it was"
        return self.process.returncode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        os.close(self._ours)
        os.close(self._theirs)


def test_top_redraws_until_q(address: str) -> None:
    with Terminal(address) as terminal:
        terminal.until(b"rollouts: 3 rows", times=3)
        terminal.until(b"rows/s in")
        terminal.type(b"xq")
        assert terminal.end() == 0
    assert terminal.shown.count(b"\x1b[?1049h") == 1
    lines = terminal.shown.split(b"\x1b[H")[1].replace(b"\x1b[K", b"").split(b"\r\n")
    assert len(lines) <= 30
    assert all(len(line) < 100 for line in lines)
