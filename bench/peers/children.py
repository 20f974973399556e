"""Child processes that answer in lines, with all processes that they start: their requests, processor time, memory and
end.

Invariants: after `end` none of the processes runs. If a process dies or does not answer in time, `Failed` is raised
with the last line of its standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ANSWER_S = 120.0
_ENDS_S = 20.0  # seconds within which a process must end after its output has ended


class Failed(Exception):
    """A system failed at a request; the text has the reason."""


class Child:
    """One process of `bench.peers.process`."""

    def __init__(self, python: Path, kind: str, system: str, env: dict[str, str], log: Path, first: Any) -> None:
        self.kind, self._log = kind, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "bench.peers.process", kind, system],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | env,
            )  # fmt: skip
        self._extra: list[psutil.Process] = []
        self.tell(first)

    def tell(self, what: Any) -> None:
        """Send a request; see `answer`. Raises `Failed` if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended", _ENDS_S) from None

    def answer(self, seconds: float = ANSWER_S) -> dict[str, Any]:
        """The next answer. Raises `Failed` if none comes within `seconds`."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise self._failed(f"did not answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended", _ENDS_S)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str, wait_s: float = 0.0) -> Failed:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        code = f" (exit code {self._process.returncode})" if self._process.returncode is not None else ""
        return Failed(f"a {self.kind} {what}{code}: {lines[-1][:300] if lines else 'it said nothing'}")

    def also(self, pids: Sequence[int]) -> None:
        """Add processes that belong to the system without being children of this process."""
        self._extra += [psutil.Process(pid) for pid in pids]

    def tree(self) -> list[psutil.Process]:
        """This process and all that it started, as far as they run."""
        found: dict[int, psutil.Process] = {}
        for root in (psutil.Process(self._process.pid), *self._extra):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return list(found.values())

    def end(self, seconds: float = 20.0) -> None:
        """End the process by closing its input. After `seconds`, kill it and all processes that it started."""
        try:
            tree = self.tree()
        except psutil.NoSuchProcess:
            tree = []
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        _, left = psutil.wait_procs(tree, 0.5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process.stdout.close()


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """The processor seconds of these processes, and of their children that have ended."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_bytes(processes: Sequence[psutil.Process]) -> int:
    """The bytes of anonymous memory of all processes, and of each shared memory file that one of them has open,
    once."""
    private, shared = 0, {}
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    private += int(line.split()[1]) * 1024
        shared |= _shared(process.pid)
    return private + sum(shared.values())


def _shared(pid: int) -> dict[tuple[int, int], int]:
    found = {}
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith(("/memfd:", "/dev/shm/")):
                    stat = os.stat(fd)
                    found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return found


@contextmanager
def sampled(processes: Callable[[], Sequence[psutil.Process]], every_s: float = 0.05) -> Iterator[list[list[float]]]:
    """A context that samples their memory. Yields a growing list of [seconds, bytes]."""
    samples: list[list[float]] = []
    stop, began = threading.Event(), time.monotonic()

    def sample() -> None:
        while True:
            samples.append([time.monotonic() - began, float(memory_bytes(processes()))])
            if stop.wait(every_s):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
