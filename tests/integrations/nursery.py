"""Processes that have torch and Ray imported already: one that imports them forks the others, so that a test of several
processes takes no longer than what it tests.

Run as a program, it takes a program and three descriptors at a time over the socket that it is given, and forks a child
that runs it: as an interpreter would that was started with it, but for the imports that are done.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


class Nursery:
    """The process that forks the others."""

    _running: subprocess.Popen[bytes] | None = None
    _settings: dict[str, str] | None = None

    def begin(self) -> None:
        """Start it, once for each of Ray's settings: Ray reads them when it is imported."""
        settings = {
            name: value for name, value in os.environ.items() if name.startswith("RAY_") and "TOKEN" not in name
        }
        if self._settings == settings:
            return
        self.close()
        self._settings = settings
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = {name: value for name, value in os.environ.items() if name != "DATAPLANE_ADDRESS"}
        inherited["RAY_DEDUP_LOGS"] = "0"  # or Ray, which reads it as it is imported, leaves out what two workers say
        self._running = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
            env={**inherited, "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def process(self, code: str, **environment: str) -> Process:
        """A process that runs the code, with this in its environment; what is on a PYTHONPATH there comes first."""
        (stdin, write), (read, stdout), (log, stderr) = os.pipe(), os.pipe(), os.pipe()
        told = json.dumps({"code": code, "environment": environment}).encode()
        socket.send_fds(self._socket, [told], [stdin, stdout, stderr])
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        return Process(int(self._socket.recv(64)), write, read, log)

    def close(self) -> None:
        if self._running is not None:
            self._socket.close()
            self._running.wait(30)


class Process:
    """One of them. It ends, at the latest, with the `with` block that it was made in."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.running = psutil.Process(pid)
        self._stdin = os.fdopen(stdin, "w")
        self._stdout = os.fdopen(stdout)
        self._stderr = os.fdopen(stderr)

    def hear(self) -> Any:
        """What it tells next. Raises AssertionError where it has ended instead."""
        for line in self._stdout:
            if line.startswith("TOLD "):
                return json.loads(line[5:])
        raise AssertionError(f"it ended:\n{self._stderr.read()}")

    def logged(self) -> str:
        return self._stderr.read()

    def say(self) -> None:
        """Let it go on where it waits for a line."""
        self._stdin.write("go on\n")
        self._stdin.flush()

    def wait(self) -> None:
        self.running.wait(30)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running.is_running():
            self.running.kill()
            self.running.wait(30)
        for file in (self._stdin, self._stdout, self._stderr):
            file.close()


def _tell(what: Any) -> None:
    print("TOLD " + json.dumps(what), flush=True)  # noqa: T201  # it is what the test hears


def _main(ours: socket.socket) -> None:
    import contextlib
    import signal

    with contextlib.suppress(ImportError):
        import ray  # noqa: F401

        from tests.integrations import ray_workers

        ray_workers.use()
    import torch
    from tensordict import NonTensorStack, TensorDict

    import dataplane.integrations.transfer_queue as tq

    names = {"tq": tq, "torch": torch, "TensorDict": TensorDict, "NonTensorStack": NonTensorStack, "tell": _tell}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is gone at once
    while True:
        told, ancillary, _, _ = ours.recvmsg(1 << 20, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not told:
            return
        descriptors = array.array("i", ancillary[0][2][:12]).tolist()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ours.close()
            sys.exit(_run(json.loads(told), descriptors, names))
        for descriptor in descriptors:
            os.close(descriptor)
        ours.send(str(pid).encode())


def _run(told: dict[str, Any], descriptors: list[int], names: dict[str, Any]) -> int:
    import traceback

    for own, descriptor in enumerate(descriptors):
        os.dup2(descriptor, own)
        os.close(descriptor)
    os.environ.update(told["environment"])
    sys.path[:0] = told["environment"].get("PYTHONPATH", "").split(os.pathsep)
    try:
        exec(told["code"], {"__name__": "__main__", "os": os, "sys": sys, **names})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
