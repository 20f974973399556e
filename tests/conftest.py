"""What every test is held to: it leaves no descriptor, thread, child or arena mapping behind, and may take its time."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing.resource_tracker
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from hypothesis import settings

if len(tempfile.gettempdir()) > 40:  # sockets of multiprocessing's servers would have too long a path (unix(7))
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"

_state = contextlib.ExitStack()
if "XDG_STATE_HOME" not in os.environ:  # where nodes without a key have this user's
    os.environ["XDG_STATE_HOME"] = _state.enter_context(tempfile.TemporaryDirectory(prefix="dataplane-state-"))


def pytest_unconfigure() -> None:
    """Not at exit: a process that used Ray ends without (`rerun`)."""
    _state.close()


pytest.register_assert_rewrite(*(f"tests.conformance.{name}" for name in ("coordinators", "storages", "transports")))

settings.register_profile("any pace", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "25")))
settings.load_profile("any pace")

SETTLE_S = 5.0  # closing is asynchronous in places: what is still open after this long is a leak

MAPPING = "memfd:dataplane"


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds that outlives a test if nobody gives it back."""

    descriptors: Counter[str]
    threads: Counter[str]
    children: dict[int, int]
    """And the parent of each."""
    mappings: Counter[str]

    @classmethod
    def now(cls, mapped: bool = True) -> Held:
        """`mapped`: whether there may be mappings; to look for them costs more than all else here."""
        return cls(_descriptors(), _threads(), _children(), _mappings() if mapped else Counter())

    def beyond(self, before: Held) -> dict[str, list[str]]:
        """What is held now and was not before, by kind; empty where nothing is."""
        grown = {
            "descriptors": self.descriptors - before.descriptors,
            "threads": self.threads - before.threads,
            "mappings": self.mappings - before.mappings,
        }
        found = {kind: sorted(more.elements()) for kind, more in grown.items() if more}
        children = [str(pid) for pid in self.children if self._started_here(pid, before)]
        return {**found, "children": children} if children else found

    def _started_here(self, pid: int, before: Held) -> bool:
        """Whether it is the test's: what a process starts that was there before, other than to be forked from, is its
        own, and may come at any time."""
        parent = self.children[pid]
        if pid in before.children:
            return False
        return parent == os.getpid() or parent not in before.children or _forks(parent, before)


_LONGEST = ("tests/simulation/test_s", "tests/docs/test_examples.py", "tests/examples/")


def _descriptors() -> Counter[str]:
    targets: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        targets[re.sub(r":\[\d+\]$", "", target)] += 1  # socket:[123] is a socket, whichever it is
    return targets


def _threads() -> Counter[str]:
    return Counter(f"{thread.name} ({thread.ident})" for thread in threading.enumerate())


def _children() -> dict[int, int]:
    """As psutil's, which reads of every process of the machine whose child it is."""
    found: dict[int, int] = {}
    left = [os.getpid()]
    while left:
        parent = left.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children", "rb", 0) as children:
                    new = [int(pid) for pid in children.read().split()]
                    found |= dict.fromkeys(new, parent)
                    left += new
    return found


def _forks(pid: int, before: Held) -> bool:
    """Whether it is a server of `multiprocessing` that was there before: what is forked from it says the same of
    itself."""
    if before.children.get(pid) != os.getpid():
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return b"multiprocessing.forkserver" in command.read()
    return False


def _mappings() -> Counter[str]:
    with open("/proc/self/maps", "rb", buffering=0) as maps:
        found = re.findall(rf"/{MAPPING}.*".encode(), maps.read())
    return Counter(map(os.fsdecode, found))


def _told(kind: str, what: str) -> str:
    """What was left behind, in words: of a child, what it runs and whether nobody waited for it."""
    if kind != "children":
        return what
    try:
        child = psutil.Process(int(what))
        with child.oneshot():
            return f"{what} {child.status()} {' '.join(child.cmdline())[:200]}"
    except psutil.Error as error:
        return f"{what} ({error})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take longest: begun last, one of them would be what all wait for."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))


def pytest_configure() -> None:
    """Give signals Python's own dispositions, here and so in all children. A shell ignores SIGINT and SIGQUIT for what
    it runs in the background, `nohup` ignores SIGHUP, some supervisors SIGCHLD, and children inherit that."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.__stderr__ is not None:
        _hard.stderr = os.dup(sys.__stderr__.fileno())  # the terminal's: nothing is captured yet


@dataclass(slots=True)
class HardLimit:
    """Ends this process, and prints what each thread does, if a test takes twice its limit. pytest-timeout raises in
    the main thread: the code under test may catch that, and a call that keeps the interpreter never sees it."""

    limit_s: float = 0.0
    stderr: int = 2

    def begin(self) -> None:
        if self.limit_s:
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self.stderr)


_hard = HardLimit()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    _hard.limit_s = 2 * settings.timeout
    _hard.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Begin again: pytest has ended the limit if the test failed."""
    _hard.begin()


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects without the garbage collector, which would go through all that stays again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Starts what lives as long as the process, so that no test is blamed for it."""
    multiprocessing.resource_tracker.ensure_running()  # the first spawned multiprocessing child would start it
    gc.collect()
    gc.freeze()  # modules and tests stay: going through them takes a third of a second each time


_mapped = [True]
"""Whether this process may have mappings before a test: where the last one left none, what a wider fixture makes."""


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Look for mappings again: this fixture's may be there before the test."""
    if fixturedef.scope != "function":
        _mapped[0] = True


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, _warm: None) -> Iterator[None]:
    """Fails a test that ends with more than it began with. `@pytest.mark.leaks(reason=...)` exempts one."""
    marker = request.node.get_closest_marker("leaks")
    if marker is not None:
        if not marker.kwargs.get("reason"):
            pytest.fail("the marker `leaks` needs a reason", pytrace=False)
        yield
        _mapped[0] = True
        return
    before = Held.now(_mapped[0])
    yield
    deadline = time.monotonic() + SETTLE_S
    pause = 0.001
    while left := (after := Held.now()).beyond(before):
        _mapped[0] = True
        gc.collect()
        if time.monotonic() > deadline:
            lines = "".join(f"\n  {kind}: {_told(kind, what)}" for kind, more in left.items() for what in more)
            pytest.fail(f"left behind after the test:{lines}", pytrace=False)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    _mapped[0] = bool(after.mappings)
