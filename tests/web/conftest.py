"""A real headless Chromium, driven by Playwright, and pages to look at with it.

Where either is missing the tests are skipped: `make test-web` installs Playwright, and Debian's `chromium` package is
the browser.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dataplane.web.access import PageAccess
from dataplane.web.feed import Feed
from dataplane.web.server import PageServer
from tests import etcd, processes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session", autouse=True)
def _workers(browser: Any) -> Iterator[None]:
    processes.warm()
    with etcd.shared():
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-web")
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium, then make test-web")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end of the test it has met no error of a script, and asked nobody else for anything."""
    contexts, faults = [], []

    def opened(url: str, **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"a script failed: {error}"))
        page.on("console", lambda told: faults.append(told.text) if told.type == "error" else None)
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(url.partition("#")[0]) else faults.append(f"asked {asked.url}"),
        )
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [fault for fault in faults if "ERR_" not in fault and "401" not in fault] == []


@contextmanager
def served(feed: Callable[[], Feed], token: str | None = None) -> Iterator[str]:
    """The page of a feed, from a thread of its own: its address."""
    started: list[str] = []
    ready, loops = threading.Event(), []

    async def serve() -> None:
        made = feed()
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        async with PageServer(made, "127.0.0.1", 0, PageAccess(token)) as server:
            looking = asyncio.ensure_future(made.run())
            started.append(server.url)
            ready.set()
            await stop.wait()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield started[0]
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()
