"""Another user of this host, for tests that run as root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OTHER = 65534  # nobody

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class OtherUser:
    """A Python program that runs as another user, is talked to by lines, and ends with the block at the latest. It has
    os, socket, sys and zmq."""

    def __init__(self, program: str, *arguments: object) -> None:
        imports = "import os, socket, sys, zmq; zmq.Context().term()\n"  # the other user may not read where they are
        become = imports + f"os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})\n"
        self._process = subprocess.Popen(
            [sys.executable, "-c", become + program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        """The next line that it says. Raises EOFError where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"it has ended: {self._process.wait(10)}")
        return line.strip()

    def say(self, line: str) -> None:
        """Tell it something."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> OtherUser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
