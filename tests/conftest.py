"""What every test is held to: it leaves no descriptor, thread, child or arena mapping behind, and may take its time."""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing.resource_tracker
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from hypothesis import settings

settings.register_profile("any pace")
settings.load_profile("any pace")

SETTLE_S = 5.0  # closing is asynchronous in places: what is still open after this long is a leak

MAPPING = "memfd:dataplane"


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds that outlives a test if nobody gives it back."""

    descriptors: Counter[str]
    threads: Counter[str]
    children: Counter[str]
    mappings: Counter[str]

    @classmethod
    def now(cls) -> Held:
        return cls(_descriptors(), _threads(), _children(), _mappings())

    def beyond(self, before: Held) -> dict[str, list[str]]:
        """What is held now and was not before, by kind; empty where nothing is."""
        grown = {
            "descriptors": self.descriptors - before.descriptors,
            "threads": self.threads - before.threads,
            "children": self.children - before.children,
            "mappings": self.mappings - before.mappings,
        }
        return {kind: sorted(more.elements()) for kind, more in grown.items() if more}


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


def _children() -> Counter[str]:
    """As psutil's, which reads of every process of the machine whose child it is."""
    found: Counter[str] = Counter()
    left = ["self"]
    while left:
        for path in glob.glob(f"/proc/{left.pop()}/task/*/children"):
            with contextlib.suppress(OSError), open(path) as children:
                left += children.read().split()
                found.update(left)
    return Counter(dict.fromkeys(found, 1))


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


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Starts what lives as long as the process, so that no test is blamed for it."""
    multiprocessing.resource_tracker.ensure_running()  # the first spawned multiprocessing child would start it
    gc.collect()
    gc.freeze()  # modules and tests stay: going through them takes a third of a second each time


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, _warm: None) -> Iterator[None]:
    """Fails a test that ends with more than it began with. `@pytest.mark.leaks(reason=...)` exempts one."""
    marker = request.node.get_closest_marker("leaks")
    if marker is not None:
        if not marker.kwargs.get("reason"):
            pytest.fail("the marker `leaks` needs a reason", pytrace=False)
        yield
        return
    before = Held.now()
    yield
    deadline = time.monotonic() + SETTLE_S
    pause = 0.001
    while left := Held.now().beyond(before):
        gc.collect()
        if time.monotonic() > deadline:
            lines = "".join(f"\n  {kind}: {_told(kind, what)}" for kind, more in left.items() for what in more)
            pytest.fail(f"left behind after the test:{lines}", pytrace=False)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
