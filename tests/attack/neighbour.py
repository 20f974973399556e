"""A node as it is started by hand, and a client of it in a process of its own that checks each of its answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import dataplane as dp
from tests.processes import WAIT_S, Worker, eventually, own_memory, pattern

_SIZE = 256 << 10
_WARM = 20_000  # frames after which a node should have all that it keeps for those who send them
_FLAT = 16 << 20  # bytes by which its memory may differ between two moments after that


class Node:
    """A running node whose log can be read. `address` is for its clients, `listens` for other nodes."""

    def __init__(self, directory: Path, *options: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "log"
        where = ["--socket", directory / "node.sock", "--spill-dir", directory / "spill", "--prewarm", "0"]
        environment = {name: value for name, value in os.environ.items() if name != "DATAPLANE_ADDRESS"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dataplane.cli", "node", *map(str, [*where, *options])],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )
        self.address = f"unix://{directory / 'node.sock'}"
        try:
            eventually(lambda: "stop with" in self.log(), "it has started")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        found = re.findall(r"address for other nodes: (\S+)", self.log())
        self.listens: str = found[0] if found else ""

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def about_others(self) -> list[str]:
        """Lines of its log that are about neither itself nor the sender of something."""
        itself = ("address for other nodes", "stop with", "was removed from the cluster")
        return [
            line
            for line in self.log().splitlines()
            if not any(each in line for each in itself) and not re.search(r"\bpid \d+|\bpeer ", line)
        ]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def memory(self) -> int:
        """Bytes of its own memory, without what it shares with its clients."""
        return own_memory(self._process.pid)

    def held(self) -> tuple[int, int]:
        """Its descriptors and threads."""
        proc = Path(f"/proc/{self._process.pid}")
        return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            ended = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            ended = -9
        if kind is None:
            assert ended == 0, f"it ended with {ended}: {self.log()[-2000:]}"


def _live(pipe: Any, address: str) -> None:
    answers, slowest = 0, 0.0
    with dp.connect(address) as plane:
        kept = plane.put({"x": pattern(77, _SIZE)})
        view = plane.get(kept)["x"].numpy()
        pipe.send("ready")
        while not pipe.poll(0.01):
            began = time.monotonic()
            ref = plane.put({"x": pattern(answers % 100, _SIZE)}, timeout=WAIT_S)
            with suppress(dp.Freed):  # whoever is of this user may free it
                assert (plane.get(ref)["x"].numpy() == pattern(answers % 100, _SIZE)).all()
            assert (view == pattern(77, _SIZE)).all()
            plane.free(ref)
            answers, slowest = answers + 1, max(slowest, time.monotonic() - began)
        pipe.recv()
        del view
        plane.free(kept)
    pipe.send((answers, slowest))
    pipe.recv()


class Neighbour:
    """Puts and gets all the while. `stop` says how often, and how long it took at most. Fails where one was wrong."""

    def __init__(self, address: str) -> None:
        self._worker = Worker(_live, address)
        assert self._worker.hear() == "ready"

    def stop(self) -> tuple[int, float]:
        """How many answers it had, all of them right, and how many seconds the slowest took."""
        answers: tuple[int, float] = self._worker.ask()
        return answers

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.__exit__(None, None, None)


class Unharmed:
    """What must hold of a node, and of what it answers to its neighbour, while others send it frames."""

    def __init__(self, node: Node, neighbour: Neighbour) -> None:
        self._node = node
        self._neighbour = neighbour
        self._warm = 0

    def look(self, sent: int) -> None:
        """So many frames were sent. Fails where the node has died."""
        assert self._node.alive, self._node.log()[-2000:]
        if not self._warm and sent >= _WARM:
            self._warm = self._node.memory()

    def end(self) -> dict[str, object]:
        """What is to be said of it. Fails where its memory has grown, or its log has lines that name no sender."""
        answers, slowest = self._neighbour.stop()
        grown = self._node.memory() - self._warm if self._warm else 0
        assert grown <= _FLAT, f"its memory grew by {grown >> 20} MiB"
        assert not self._node.about_others(), self._node.about_others()[:5]
        return {"right answers of a neighbour": answers, "s the slowest": round(slowest, 2), "MiB grown": grown >> 20}
