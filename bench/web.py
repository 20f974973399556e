"""The cost of the page in a browser: 64 hosts x 100 streams, every row unfolded, a tick each second.

Only the cluster is generated: figures are made from a seed (`bench.cluster_figures`), pass through the feed and the
server like a node's, and are drawn by a headless Chromium, in software, on this machine. The browser reports the times
of its main thread (`Performance.getMetrics`): ThreadTime, the processor time, and TaskDuration, which on a shared
machine includes the time of other processes. It reports tasks of more than 50 ms as long.

Needs Playwright and Debian's `chromium`: `make test-web` installs the first, and says how to get the second.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import shutil
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from bench.cluster_figures import GeneratedPlane
from bench.measure import Row, row, table
from dataplane.web.access import PageAccess
from dataplane.web.cluster_view import look
from dataplane.web.feed import Feed, FeedTick
from dataplane.web.server import PageServer

HOSTS, STREAMS = 64, 100
PAST, TICKS = 4, 8
PLACES = ("streams", "hosts", "step")
RUN_S = 10.0
BUSY = 10.0


def serve(pipe: Connection, hosts: int, streams: int) -> None:
    """Serve the page of a generated cluster. Its ticks are generated before, so that this takes no time later."""
    asyncio.run(_serve(pipe, hosts, streams))


async def _serve(pipe: Connection, hosts: int, streams: int) -> None:
    now = [0.0]
    plane = GeneratedPlane(hosts, streams, ill=("task", "host"), ill_s=PAST, clock=lambda: now[0])
    feed = Feed(plane.address)
    ticks: list[FeedTick] = []
    began_s = time.time()
    for second in range(PAST + TICKS):
        now[0] = float(second)
        seen = await look(plane)  # type: ignore[arg-type]
        feed.took(dataclasses.replace(seen, at_s=now[0], wall_s=began_s + second))
        ticks.append(dataclasses.replace(feed.tick, every_s=1.0))
    async with PageServer(feed, "127.0.0.1", 0, PageAccess(None)) as server:
        pipe.send(server.url)
        number = feed.tick.number
        while not pipe.poll():
            number += 1
            tick = ticks[PAST + number % TICKS]
            sample = tick.sample
            if sample is not None:
                sample = dataclasses.replace(sample, at=began_s + PAST + TICKS + number)
            feed.publish(dataclasses.replace(tick, number=number, sample=sample, placement=feed.placement.version))
            await asyncio.sleep(1.0)


def busy(page: Any, session: Any, seconds: float) -> tuple[float, float]:
    """The load of the page's main thread during `seconds`, in percent: its processor time, and the duration of its
    tasks."""

    def spent() -> dict[str, float]:
        return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}

    before = spent()
    page.wait_for_timeout(1000 * seconds)
    after = spent()
    passed_s = after["Timestamp"] - before["Timestamp"]
    computed, tasks = (100 * (after[of] - before[of]) / passed_s for of in ("ThreadTime", "TaskDuration"))
    return computed, tasks


def measured(chromium: str, runs: int) -> list[Row]:
    """Measure the load of the main thread at each place of the page, `runs` times."""
    from playwright.sync_api import sync_playwright

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, HOSTS, STREAMS), daemon=True)
    server.start()
    shares: dict[str, list[float]] = {place: [] for place in PLACES}
    passed: list[float] = []
    long_tasks: list[float] = []
    try:
        url = ours.recv()
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(url)
            page.locator("#live[data-state=live]").wait_for(timeout=60_000)
            page.locator("#more-streams").click(timeout=60_000)
            page.locator("#more-hosts").click()
            assert (page.locator(".stream").count(), page.locator("#host-rows tr").count()) == (STREAMS, HOSTS)
            page.evaluate(
                "window.long = []; new PerformanceObserver((l) => l.getEntries().forEach((e) =>"
                " window.long.push(e.duration))).observe({ type: 'longtask' })"
            )
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")
            for _ in range(runs):
                for place in PLACES:
                    page.evaluate(f"document.getElementById('{place}').scrollIntoView({{ behavior: 'instant' }})")
                    page.wait_for_timeout(1500)
                    page.evaluate("window.long.length = 0")
                    computed, tasks = busy(page, session, RUN_S)
                    shares[place].append(computed)
                    passed.append(tasks)
                    long_tasks.append(sum(page.evaluate("window.long")) / RUN_S / 10)
            browser.close()
        ours.send(None)
        server.join(30)
    finally:
        if server.is_alive():
            server.kill()
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    waited = f"with others' turns {min(passed):.1f}..{max(passed):.1f} %"
    detail = f"{HOSTS} hosts x {STREAMS} streams, a tick a second; {waited}, {load}"
    found = [row(f"main thread busy at {p}", shares[p], at_most=BUSY, unit="%", detail=detail) for p in PLACES]
    return [*found, row("of it in tasks of more than 50 ms", long_tasks, at_most=BUSY, unit="%", detail=detail)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.web", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each place of the page (default: 5)")
    chosen = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no browser: apt-get install chromium", file=sys.stderr)
        return 2
    rows = measured(chromium, chosen.runs)
    print(table(rows))
    return 0 if all(each.met for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
