"""Real processes for tests: workers that are talked to over a pipe, and nodes that stand by themselves.

A worker runs a function of a test module in a process of its own and ends, at the latest, with the `with` block that
it was made in, however it was treated there. Workers are forked from a server that has done the imports already and
has no threads, so that one takes a few milliseconds.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from dataplane import cli
from dataplane.config import NodeConfig
from dataplane.node.node import NodeServer, run

T = TypeVar("T")

WAIT_S = 60.0  # more than anything here takes on the busiest machine, and less than a test's limit
MIB = 1 << 20

_context = multiprocessing.get_context("forkserver")
_PRELOADED = """
    numpy pyarrow pytest psutil encodings.idna dataplane.client.sync dataplane.cli dataplane.node.node
    dataplane.node.hosts dataplane.cluster.ensemble dataplane.coordinator.etcd aiohttp
    cryptography.x509 tests.processes
"""  # what a node among others imports as it starts: a fork that has none of it takes four times as long
PRELOADED = _PRELOADED.split()
FROZEN = "tests.frozen"
_context.set_forkserver_preload([*PRELOADED, FROZEN])


def warm() -> None:
    """Start the server that workers are forked from, so that no test is taken to have left it behind.

    A process has one, so a module that says otherwise as it is imported makes each fork import all by itself, which
    takes four times as long: the suite once took half as long again for one such line.
    """
    preloaded = multiprocessing.forkserver._forkserver._preload_modules
    assert preloaded == [*PRELOADED, FROZEN], f"a module has had the server of forks import something else: {preloaded}"
    multiprocessing.forkserver.ensure_running()
    with Worker(_nothing):
        pass


def _nothing(_: Connection) -> None:
    pass


def before_requests(connection: Any, do: Callable[[Any], object]) -> None:
    """Call `do(request)` before each request that this connection sends from now on, however it is made; of one that is
    a stream's own, without its envelope."""
    ask = connection._ask

    def asked(request: Any) -> Any:
        do(getattr(request, "asked", request))
        return ask(request)

    connection._ask = asked


def eventually(condition: Callable[[], T], what: str = "", timeout_s: float = WAIT_S) -> T:
    """The first true value of `condition()`; an AssertionError naming `what` where none comes in time."""
    deadline = time.monotonic() + timeout_s
    pause = 0.001
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came true: {what or condition}"
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return value


async def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The first true value of `condition()`, or of what it awaits, while the loop goes on."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.002)


def pattern(seed: int, nbytes: int, rows: int = 1) -> npt.NDArray[np.uint64]:
    """[rows, n] values, `nbytes` in all, that no other seed gives at any place."""
    return (np.arange(nbytes // 8, dtype=np.uint64) + np.uint64(seed << 32)).reshape(rows, -1)


def own_memory(pid: int) -> int:
    """Bytes of a process that are no file's and not shared."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def has_ipv6() -> bool:
    """Whether this host has an address of IPv6 to listen at."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextmanager
def without_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Worker:
    """`work(pipe, *args)` in a process of its own; `work` is a function of a module. `context`: another server that it
    is forked from."""

    def __init__(self, work: Callable[..., None], *args: Any, context: ForkServerContext = _context) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_perform, args=(theirs, work, args), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or -1

    def say(self, what: Any = None) -> None:
        self._pipe.send(what)

    def hear(self, timeout_s: float = WAIT_S) -> Any:
        """What it sends next. Raises AssertionError where it failed or says nothing, EOFError where it has ended."""
        assert self._pipe.poll(timeout_s), f"the worker said nothing for {timeout_s} s"
        fine, what = self._pipe.recv()
        assert fine, f"the worker failed:\n{what}"
        return what

    def ask(self, what: Any = None) -> Any:
        """Send it an object, and return what it says to that."""
        self.say(what)
        return self.hear()

    def freeze(self) -> None:
        """Stop it (SIGSTOP); it has stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, "the worker stopped")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        os.kill(self.pid, how)
        return self.join()

    def join(self) -> int:
        self._process.join(WAIT_S)
        assert self._process.exitcode is not None, "the worker did not end"
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class _Stage:
    """A worker's end of its pipe: what it says arrives as said."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, what: Any) -> None:
        self._pipe.send((True, what))

    def recv(self) -> Any:
        return self._pipe.recv()

    def poll(self, timeout_s: float = 0.0) -> bool:
        return self._pipe.poll(timeout_s)


def _perform(pipe: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        work(_Stage(pipe), *args)
    except EOFError:  # the test has gone
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


class StandingNode(Worker):
    """A node by itself, with its store's settings as keywords. `address` is what to connect to."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        settings = {"memory": "16MiB", "spill": "64MiB", "prewarm": 0, "spill_dir": directory / "spill"} | settings
        super().__init__(_serve, directory / "node.sock", settings)
        try:
            self.address: str = self.hear()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> StandingNode:
        return self


def _serve(pipe: Connection, path: Path, settings: dict[str, Any]) -> None:
    node = NodeServer(NodeConfig(**settings), path)
    run(node, ready=lambda: pipe.send(node.address))


class Command:
    """`dataplane ARGUMENTS`, as `subprocess.Popen` would run it, but forked: a process of it by itself takes half a
    second of a processor before it does anything. `stdout` is a pipe; what else it says is added to `log`."""

    def __init__(self, *arguments: object, log: Path = Path(os.devnull)) -> None:
        ours, theirs = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_command, args=(theirs, [*map(str, arguments)], log), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or -1
        self.stdout = os.fdopen(os.dup(ours.fileno()), "rb")
        ours.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, how: signal.Signals) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # the server of forks has seen it end, and we not yet
                os.kill(self.pid, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, "the command did not end"
        return self._process.exitcode

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


def _command(stdout: Connection, arguments: list[str], log: Path) -> None:
    with log.open("a", buffering=1) as said:
        os.dup2(stdout.fileno(), 1)
        os.dup2(said.fileno(), 2)
        stdout.close()
        sys.stdout, sys.stderr = os.fdopen(1, "w"), said
        logging.getLogger().handlers.clear()
        sys.exit(cli.main(arguments))
